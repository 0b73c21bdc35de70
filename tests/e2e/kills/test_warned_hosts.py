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
