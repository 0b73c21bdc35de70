"""A job that loses a host for good goes on with fewer ranks, from the memory of those that stay."""

import pytest

from tests.e2e.job import Ndctl, assert_nothing_left, wait_for
from tests.e2e.test_scale_up import AXES, assert_same_training, starts, stopped_as_it_starts

pytestmark = [pytest.mark.process, pytest.mark.xdist_group("e2e"), pytest.mark.timeout(900)]


@pytest.mark.slow
def test_fewer_hosts_and_then_more_resume_from_memory(ndctl: Ndctl, reference: Ndctl) -> None:
    # Slow steps, so that two ranks are not at the end before host-1 is back.
    drills = ("--drill", "kill:host=1@step=13", "--drill", "slow:rank=0@step=14")
    done = ndctl.submit(*drills, checkpoint__memory__every="1", **AXES)
    assert done.code == 0, done.out + done.err
    wait_for(lambda: ndctl.num_steps() >= 1, "the first step")
    with stopped_as_it_starts(ndctl):
        wait_for(lambda: len(starts(ndctl)) > 1, "a start without host-1")
    wait_for(ndctl.has_ended, "the end")
    assert ndctl.status()["state"] == "SUCCEEDED"
    assert [start["hosts"] for start in starts(ndctl)] == [
        ["host-0", "host-1"],
        ["host-0"],
        ["host-0", "host-1"],
    ]
    _, fewer, more = ndctl.events("TrainingResumed")
    # The checkpoints on the disk are of steps 8, 16 and 24; copies take some of these short steps.
    assert fewer["in_memory"], "host-0 has copies of what ranks 2 and 3 had"
    assert 8 < fewer["step"] <= 12
    assert more["in_memory"], "two ranks made it, and four read it"
    assert more["step"] >= 16
    assert_same_training(ndctl, reference)
    assert_nothing_left(ndctl.run_dir)
