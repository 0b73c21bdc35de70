"""A straggler in a job of real ranks."""

from pathlib import Path

import pytest

from tests.e2e.job import TP, Ndctl, assert_nothing_left

pytestmark = [pytest.mark.process, pytest.mark.xdist_group("e2e"), pytest.mark.timeout(600)]


@pytest.mark.slow
def test_a_slowed_rank_is_named_and_its_peers_are_not(ndctl: Ndctl) -> None:
    more = {
        "train__steps": "40",
        "checkpoint__every_steps": "100",
        "train__schedule__kind": "constant",
        **TP,
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


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_ranks_of_a_straggler_move_to_a_spare_after_the_next_checkpoint(
    ndctl: Ndctl, tmp_path: Path
) -> None:
    """Compares two jobs of 64 steps, one of them with a straggler."""
    more = {"train__steps": "64", "checkpoint__keep": "9", **TP}
    alone = Ndctl(tmp_path / "alone")
    done = alone.submit("--follow", **more)
    assert done.code == 0, done.out + done.err

    more |= {"cluster__spare_hosts": "1", "resilience__replace_stragglers": "true"}
    done = ndctl.submit("--follow", "--drill", "slow:rank=2@step=6", **more)
    assert done.code == 0, done.out + done.err
    found = ndctl.events("StragglerFound")[0]
    assert (found["rank"], found["host"]) == (2, "host-1")
    first, second = (action for action in ndctl.actions() if action["kind"] == "StartAttempt")
    assert (first["hosts"], second["hosts"]) == (["host-0", "host-1"], ["host-0", "host-2"])
    (stop,) = (action for action in ndctl.actions() if action["kind"] == "StopAttempt")
    assert "host-1 keeps its peers waiting: rank 2 takes" in stop["reason"]
    kinds = [event["kind"] for event in ndctl.journal()]
    assert "CheckpointSaved" in kinds[kinds.index("StragglerFound") : kinds.index("HostStopped")]
    _, resumed = ndctl.events("TrainingResumed")
    assert resumed["step"] in [event["step"] for event in ndctl.events("CheckpointSaved")]

    status = ndctl.status()
    assert (status["state"], status["attempt"], status["restarts"]) == ("SUCCEEDED", 2, 0)
    assert status["incidents"] == []
    assert len(ndctl.metrics()) == 64, "no step was trained twice"
    assert ndctl.losses() == alone.losses()
    assert_nothing_left(ndctl.run_dir)
