"""A host that warns of its own failure is replaced at the end of a step, and nothing is lost."""

import pytest

from tests.e2e.job import Ndctl, assert_nothing_left

pytestmark = [pytest.mark.process, pytest.mark.xdist_group("e2e"), pytest.mark.timeout(600)]


def test_a_spare_replaces_a_host_that_warns_without_a_lost_step(
    ndctl: Ndctl, reference: Ndctl
) -> None:
    done = ndctl.submit(
        "--follow",
        *("--drill", "warn:host=1@step=11"),
        cluster__spare_hosts="1",
        checkpoint__memory__every="1",
    )
    assert done.code == 0, done.out + done.err
    assert ndctl.losses() == reference.losses()
    steps = [metric["step"] for metric in ndctl.metrics()]
    assert steps == list(range(1, 25)), "no step was trained twice"
    last = next(metric["step"] for metric in ndctl.metrics() if metric["attempt"] == 2) - 1
    resumed = ndctl.events("TrainingResumed")[-1]
    assert resumed["step"] == last
    assert resumed.get("in_memory", False) == (last != 16), "the disk has step 16 at any rate"
    saved = [event["step"] for event in ndctl.events("CheckpointSaved")]
    assert saved == [8, 16, 24], "the stop did not write the disk"

    first, second = (action for action in ndctl.actions() if action["kind"] == "StartAttempt")
    assert (first["hosts"], second["hosts"]) == (["host-0", "host-1"], ["host-0", "host-2"])
    (stop,) = (action for action in ndctl.actions() if action["kind"] == "StopAttempt")
    assert stop["reason"].startswith("host-1 warns: drill warn:host=1@step=11")
    (warned,) = ndctl.events("HostWarned")
    assert (warned["host"], warned["problem"]) == ("host-1", "gpu-memory")

    status = ndctl.status()
    assert (status["state"], status["attempt"], status["restarts"]) == ("SUCCEEDED", 2, 0)
    (incident,) = status["incidents"]
    assert (incident["kind"], incident["lost_steps"]) == ("host-warned", 0)
    assert (incident["culprit"]["host"], incident["drill"]) == ("host-1", "warn:host=1@step=11")
    assert "host-1 warns" in done.out
    assert_nothing_left(ndctl.run_dir)


# In every run tests/job/step/test_warned_hosts.py has the decision.
@pytest.mark.slow
def test_without_a_spare_a_checkpoint_is_saved_at_once(ndctl: Ndctl, reference: Ndctl) -> None:
    drill = ("--drill", "warn:host=1@step=3")
    done = ndctl.submit("--follow", *drill, checkpoint__every_steps="20")
    assert done.code == 0, done.out + done.err
    assert ndctl.losses() == reference.losses()
    assert ndctl.status()["attempt"] == 1
    (asked,) = (action for action in ndctl.actions() if action["kind"] == "SaveCheckpoint")
    assert asked["reason"].endswith("; no spare host is free")
    saved = [event["step"] for event in ndctl.events("CheckpointSaved")]
    (extra,) = {*saved} - {20, 24}
    assert 3 <= extra < 20
    assert_nothing_left(ndctl.run_dir)
