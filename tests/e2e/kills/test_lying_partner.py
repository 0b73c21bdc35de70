"""A partner whose copies have changed is named, and no rank loads them."""

import time

import pytest

from tests.e2e.job import LONG_TIMEOUTS, Ndctl, assert_nothing_left, kill, wait_for
from tests.e2e.kills.targets import flip, processes

pytestmark = [pytest.mark.process, pytest.mark.xdist_group("e2e"), pytest.mark.timeout(900)]


# In every run tests/agent/memory/test_host_copies.py has a partner that lies.
@pytest.mark.slow
def test_copies_that_have_changed_are_refused_by_name(ndctl: Ndctl, reference: Ndctl) -> None:
    done = ndctl.submit(checkpoint__memory__every="1", **LONG_TIMEOUTS)
    assert done.code == 0, done.out + done.err
    # Steps do not wait for the files of step 8, and on a busy machine two steps pass meanwhile.
    wait_for(lambda: ndctl.events("CheckpointSaved"), "a checkpoint on the disk")
    wait_for(lambda: ndctl.num_steps() >= 10, "step 10")
    with ndctl.paused_ranks():
        time.sleep(1.0)  # what is being sent arrives
        agents = {one.host: one.pid for one in processes(ndctl.run_dir) if one.kind == "agent"}
        assert flip(agents["host-0"], ranks=(2, 3)) >= 2
        kill(agents["host-1"])
    wait_for(ndctl.has_ended, "the end")
    assert ndctl.losses() == reference.losses()
    resumed = ndctl.events("TrainingResumed")[-1]
    assert not resumed.get("in_memory")
    assert resumed["step"] in (8, 16), "from the disk"
    passed = [f"{one['name']}: {one['why']}" for one in resumed["passed_over"]]
    assert any(
        "in memory on host-0: the copy of rank 2 has changed since it was made" in one
        for one in passed
    ), passed
    assert "skipped step-" in ndctl("events", "e2e").out
    assert_nothing_left(ndctl.run_dir)
