"""`ndctl snapshot` of a real job."""

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
    assert ndctl("cancel", "e2e").code == 0
    done = ndctl("snapshot", "e2e")
    assert done.code == 5
    assert "is not running: CANCELLED" in done.err
