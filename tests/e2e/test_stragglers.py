"""A rank that is really slow, among real ranks."""

import pytest

from tests.e2e.job import Ndctl, assert_nothing_left

pytestmark = [pytest.mark.process, pytest.mark.xdist_group("e2e"), pytest.mark.timeout(600)]


def test_a_slowed_rank_is_named_and_its_peers_are_not(ndctl: Ndctl) -> None:
    more = {
        "train__steps": "40",
        "checkpoint__every_steps": "100",
        "train__schedule__kind": "constant",
    }
    done = ndctl.submit("--follow", "--drill", "slow:rank=2@step=6", **more)
    assert done.code == 0, done.out + done.err
    (found,) = ndctl.events("StragglerFound")
    assert (found["rank"], found["host"]) == (2, "host-1")
    assert found["own_s"] > found["peers_s"] + 0.2
    assert found["lost_tokens_per_second"] > 0
    assert "straggler on host-1: rank 2 takes" in done.out
    assert ndctl.status()["incidents"] == []
    assert ndctl.events("HangDetected") == []
    assert_nothing_left(ndctl.run_dir)
