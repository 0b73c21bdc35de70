"""Ranks resume from the memory of their hosts: losses are bit for bit those of an undisturbed run,
and no file of a checkpoint is read."""

import json
from collections.abc import Mapping

import pytest

from tests.e2e.job import Ndctl, assert_nothing_left

pytestmark = [pytest.mark.process, pytest.mark.xdist_group("e2e"), pytest.mark.timeout(1200)]

IN_MEMORY: Mapping[str, str] = {"checkpoint__memory__every": "1"}


def resumed(ndctl: Ndctl) -> list[tuple[int, bool]]:
    """Step from which each attempt resumed, and whether it came from memory."""
    lines = (ndctl.run_dir / "journal.jsonl").read_text().splitlines()
    events = [json.loads(line).get("event", {}) for line in lines]
    return [
        (event["step"], event.get("in_memory", False))
        for event in events
        if event.get("kind") == "TrainingResumed"
    ]


@pytest.mark.slow
def test_killed_ranks_and_hosts_cost_a_few_steps_and_no_checkpoint_is_read(
    ndctl: Ndctl, reference: Ndctl
) -> None:
    # The checkpoints on the disk are of steps 8, 16 and 24.
    faults = ("kill:rank=3@step=6", "exit:rank=0@step=14", "kill:host=1@step=21")
    drills = [word for fault in faults for word in ("--drill", fault)]
    done = ndctl.submit("--follow", *drills, **IN_MEMORY)
    assert done.code == 0, done.out + done.err
    assert ndctl.losses() == reference.losses()
    assert "resumes from step" in done.out
    start, first, second, third = resumed(ndctl)
    assert start == (0, False)
    # Steps take milliseconds here, so the copies of all ranks may complete some steps later.
    assert first in {(step, True) for step in range(1, 6)}
    assert second in {(step, True) for step in range(9, 14)}
    assert third in {(step, True) for step in range(17, 21)}, "its slots came from its partner"
    lost = [incident["lost_steps"] for incident in ndctl.status()["incidents"]]
    assert lost == [5 - first[0], 13 - second[0], 20 - third[0]]
    assert_nothing_left(ndctl.run_dir)
