"""`checkpoint.every: auto` in a training: ranks agree, and each change is reported once."""

import json
from pathlib import Path
from typing import Any

import pytest

from orchestrator.contract.checkpoint_interval import Exposure, SavePace
from orchestrator.contract.codec import encode
from orchestrator.contract.messages.events import CheckpointIntervalChanged, CheckpointSaved
from tests.trainer.checkpoint.checkpoint_launch import listening, with_fence
from tests.trainer.launch.tiny_runs import LIGHT, tiny, work

pytestmark = [pytest.mark.process, pytest.mark.xdist_group("saves")]

NO_FAILURES = SavePace()
"""The pace of a job on one host without a failure so far."""


def trained(tmp_path: Path, pace: SavePace, **checkpoint: Any) -> list[Any]:
    """The datagrams that two ranks sent to their agent in 16 steps."""
    saving = {"every": "auto", "every_steps": 3, "keep": 20, **checkpoint}
    two = {"parallel": {"dp_shard": 2}, "checkpoint": saving}
    config = tiny(tmp_path / "run", steps=16, **two, **LIGHT)
    env = {
        "NDCTL_HEARTBEAT_SOCKET": str(tmp_path / "agent"),
        "NDCTL_PACE": json.dumps(encode(pace)),
    }
    with listening(tmp_path / "agent") as heard:
        (answer,) = work(tmp_path, 2, [{"config": with_fence(config)}], env=env)
        assert answer["code"] == 0
        found = []
        for datagram in heard:
            found.append(datagram)
            if isinstance(datagram, CheckpointSaved) and datagram.step == 16:
                break
    return found


@pytest.mark.parametrize("in_background", [True, False])
def test_the_first_save_measures_the_cost_of_the_next(tmp_path: Path, in_background: bool) -> None:
    told = trained(tmp_path, NO_FAILURES, **{"async": in_background})
    # Step times vary on a busy machine, so a later save may change the interval again.
    changed, *later = [one for one in told if isinstance(one, CheckpointIntervalChanged)]
    assert all(one.new > 100 for one in later)
    saved = [one.step for one in told if isinstance(one, CheckpointSaved)]
    assert saved[0] == 3
    assert changed.old == 3
    assert changed.new > 100
    assert changed.why.startswith("a save costs ")
    assert "one failure per" in changed.why
    # Saves that were due by the old interval before the change, and the last step.
    assert saved[1:-1] == [step for step in (6, 9, 12, 15) if step < changed.step]


def test_saves_without_a_pause_between_them_are_measured_too(tmp_path: Path) -> None:
    told = trained(tmp_path, NO_FAILURES, every_steps=1)
    changed = next(one for one in told if isinstance(one, CheckpointIntervalChanged))
    assert changed.old == 1
    assert changed.new > 100
    saved = [one.step for one in told if isinstance(one, CheckpointSaved)]
    assert saved == [*range(1, changed.step), 16]


def test_an_attempt_continues_with_the_interval_of_the_previous_one(tmp_path: Path) -> None:
    pace = SavePace(exposure=Exposure(observed_s=1e5), every_steps=7)
    told = trained(tmp_path, pace)
    assert next(one.step for one in told if isinstance(one, CheckpointSaved)) == 7
    assert next(one.old for one in told if isinstance(one, CheckpointIntervalChanged)) == 7
