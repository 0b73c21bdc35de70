"""`ndctl snapshot` and `ndctl profile` of a real job."""

import gzip
import json
from pathlib import Path

import pytest

from tests.e2e.job import Ndctl, wait_for

pytestmark = pytest.mark.process


def test_the_stacks_of_all_ranks_are_shown_and_the_job_goes_on(ndctl: Ndctl) -> None:
    assert ndctl.submit(train__steps="100000").code == 0
    wait_for(lambda: ndctl.num_steps() > 3 or ndctl.has_ended(), "steps")
    done = ndctl("snapshot", "e2e", "--json")
    assert done.code == 0, done.err
    body = json.loads(done.out)
    assert next(iter(body.items())) == ("schema_version", 1)
    assert sorted(body["ranks"], key=int) == ["0", "1", "2", "3"]
    assert body["missing"] == {}
    assert all(one["step"] > 0 for one in body["ranks"].values())
    for rank in body["ranks"]:
        text = (Path(body["traces"]) / f"rank-{rank}.stacks").read_text()
        assert "trainer/loop.py" in text
    done = ndctl("snapshot", "e2e")
    assert done.out.startswith("attempt 1: 4 ranks, step")
    assert "stack of rank 0:" in done.out
    assert done.out.rstrip().endswith(f"{body['traces']}/rank-<r>.stacks")
    before = ndctl.num_steps()
    wait_for(lambda: ndctl.num_steps() > before, "the job to go on")
    assert not ndctl.events("EvidenceGathered")
    profile_two_ranks(ndctl)
    assert ndctl("cancel", "e2e").code == 0
    for verb in ("snapshot", "profile"):
        done = ndctl(verb, "e2e")
        assert done.code == 5
        assert "is not running: CANCELLED" in done.err


def profile_two_ranks(ndctl: Ndctl) -> None:
    """Ranks of both hosts record two steps each, and the job goes on."""
    done = ndctl("profile", "e2e", "--ranks", "1,2", "--steps", "2", "--json")
    assert done.code == 0, done.err
    body = json.loads(done.out)
    assert body["missing"] == {}
    assert sorted(body["ranks"]) == ["1", "2"]
    for rank, one in body["ranks"].items():
        [trace] = one["files"]
        assert trace.endswith(
            f"profiles/attempt-1/rank-{rank}.step-{one['first_step']}.trace.json.gz"
        )
        events = json.loads(gzip.decompress(Path(trace).read_bytes()))["traceEvents"]
        assert sum(event.get("name", "").startswith("Optimizer.step#") for event in events) == 2
    before = ndctl.num_steps()
    wait_for(lambda: ndctl.num_steps() > before, "the job to go on")
    done = ndctl("profile", "e2e", "--steps", "1")
    assert "rank 0, attempt 1, from step" in done.out
    assert "https://ui.perfetto.dev" in done.out
    done = ndctl("profile", "e2e", "--ranks", "4")
    assert done.code == 5
    assert "it has 4 ranks, and none is number 4" in done.err
    assert ndctl("profile", "e2e", "--ranks", "first").code == 2
