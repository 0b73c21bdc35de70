"""An administrator resumes a drained node: the job uses it again.

`test_drained_hosts.py` tests that a job continues with fewer or other nodes.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.job import LONG_TIMEOUTS, TP, Ndctl, wait_for
from tests.slurm.e2e.slurm_job import LIMIT_S, SlurmNdctl, hosts_of, incidents
from tests.slurm.testbed import SlurmTestbed, running_testbed

pytestmark = [pytest.mark.slurm, pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(1500)]

STEPS = {"train__steps": "64"}
"""Far more steps than are trained while a checkpoint is written."""
END_S = 600.0
"""Time limit of these longer jobs on a busy machine."""
LOSS_TOLERANCE = 1e-3
"""Tolerance between float32 losses of two meshes some steps after the change."""


@pytest.fixture(scope="module")
def three_nodes(slurm_available: None) -> Iterator[SlurmTestbed]:
    """One node more than the job needs, all below one switch: with two switches Slurm would wait
    minutes for nodes below the same one."""
    with running_testbed(nodes=3, gpus=2, knobs={"TB_LEAF": "3"}) as testbed:
        yield testbed


@pytest.fixture(scope="module")
def uninterrupted_losses(
    slurm_available: None, tmp_path_factory: pytest.TempPathFactory
) -> dict[int, float]:
    """Losses of the same job without a fault."""
    command = Ndctl(tmp_path_factory.mktemp("whole"))
    done = command.submit("--follow", **TP, **STEPS)
    assert done.code == 0, done.out + done.err
    return command.losses()


@pytest.fixture
def ndctl(three_nodes: SlurmTestbed, tmp_path: Path) -> Iterator[SlurmNdctl]:
    three_nodes.restore()
    command = SlurmNdctl(tmp_path / "runs", three_nodes)
    yield command
    if command.run_dir.exists():
        command("cancel", "e2e")
        command.assert_nothing_left()


REQUEUE_ON_DRAIN = {"cluster__slurm__on_drain": "checkpoint_and_requeue"}


def drain(ndctl: SlurmNdctl, host: str, reason: str) -> None:
    """Drains `host` and waits until the leader knows; it asks Slurm every 15 s."""

    def heard() -> bool:
        return any(flag["reason"].startswith(reason) for flag in ndctl.events("HostFlagged"))

    with ndctl.paused_ranks():
        update(ndctl, host, "State=DRAIN", f"Reason={reason}")
        wait_for(heard, f"word of {host}", LIMIT_S)


def update(ndctl: SlurmNdctl, host: str, *what: str) -> None:
    ndctl.testbed.output_of("scontrol", "update", f"NodeName={host}", *what)


def other_than_the_leader(ndctl: SlurmNdctl) -> str:
    (host,) = {*hosts_of(ndctl)} - {ndctl.leaders()[-1]}
    return host


def hosts_of_runs(ndctl: SlurmNdctl) -> list[list[str]]:
    """The nodes of each allocation."""
    return [event["allocation"]["hosts"] for event in ndctl.events("LeaderStarted")]


def assert_no_step_lost(ndctl: SlurmNdctl) -> None:
    """No step was trained twice, and no restart was counted."""
    left: dict[int, int] = {}
    for metric in ndctl.metrics():
        left[metric["attempt"]] = metric["step"]
    first, *others = (event["step"] for event in ndctl.events("TrainingResumed"))
    assert [first, *others] == [0, *list(left.values())[:-1]]
    assert incidents(ndctl) == []
    assert ndctl.status()["restarts"] == 0


def test_a_job_that_shrank_grows_when_the_node_returns(
    ndctl: SlurmNdctl, uninterrupted_losses: dict[int, float]
) -> None:
    """The allocation does not change: a drained node stays part of it."""
    done = ndctl.submit(resilience__shrink="true", **REQUEUE_ON_DRAIN, **STEPS, **LONG_TIMEOUTS)
    assert done.code == 0, done.err
    ndctl.wait_for_step(step=3)
    both, drained = hosts_of(ndctl), other_than_the_leader(ndctl)
    drain(ndctl, drained, "a fan is loud")
    ndctl.wait_for_step(step=2, attempt=2)
    assert hosts_of(ndctl) == [host for host in both if host != drained]
    with ndctl.paused_ranks():
        update(ndctl, drained, "State=RESUME")
        wait_for(lambda: ndctl.events("HostOpened"), f"word of {drained}", LIMIT_S)
    ndctl.wait_for_end(limit=END_S)

    (opened,) = ndctl.events("HostOpened")
    assert opened["host"] == drained
    stops = [action["reason"] for action in ndctl.actions() if action["kind"] == "StopAttempt"]
    assert len(stops) == 2
    assert "a fan is loud" in stops[0]
    assert stops[1].startswith("growing from 1 to 2 hosts")
    assert f"{drained} can be used again" in stops[1]
    assert sorted(hosts_of(ndctl)) == sorted(both)
    assert ndctl.status()["attempt"] == 3
    assert_no_step_lost(ndctl)
    assert ndctl.losses() == pytest.approx(uninterrupted_losses, abs=LOSS_TOLERANCE)
    assert len(hosts_of_runs(ndctl)) == 1
    job = ndctl.slurm_job()
    assert (job["JobState"], job["Restarts"]) == ("COMPLETED", "0")
    ndctl.assert_nothing_left()


def test_the_run_after_the_next_uses_the_repaired_node(
    ndctl: SlurmNdctl, uninterrupted_losses: dict[int, float]
) -> None:
    """The next run excludes the drained node. Then another node is drained, and the run after that
    uses the first node again."""
    done = ndctl.submit(**REQUEUE_ON_DRAIN, **STEPS, **LONG_TIMEOUTS)
    assert done.code == 0, done.err
    ndctl.wait_for_step(step=3)
    drained = other_than_the_leader(ndctl)
    drain(ndctl, drained, "a fan is loud")
    ndctl.wait_for_step(step=4, attempt=2)
    assert ndctl.slurm_job()["ExcNodeList"] == drained
    assert drained not in hosts_of_runs(ndctl)[1]
    update(ndctl, drained, "State=RESUME")
    second = other_than_the_leader(ndctl)
    drain(ndctl, second, "so is this one")
    ndctl.wait_for_end(limit=END_S)

    assert len(hosts_of_runs(ndctl)) == 3
    assert sorted(hosts_of(ndctl)) == sorted({*ndctl.testbed.names} - {second})
    assert drained in hosts_of(ndctl)
    first, again = (one for one in ndctl.actions() if one["kind"] == "Requeue")
    assert (first["exclude"], first["again"]) == ([drained], [])
    assert (again["exclude"], again["again"]) == ([second], [drained])
    assert_no_step_lost(ndctl)
    assert ndctl.losses() == uninterrupted_losses
    job = ndctl.slurm_job()
    assert (job["JobState"], job["Restarts"]) == ("COMPLETED", "2")
    assert job["ExcNodeList"] == second
    ndctl.assert_nothing_left()


def test_a_job_that_needs_the_node_waits_for_it(
    ndctl: SlurmNdctl, uninterrupted_losses: dict[int, float]
) -> None:
    """With the node in ExcNodeList the job would stay BadConstraints after the node is resumed."""
    (away, *_) = ndctl.testbed.names
    update(ndctl, away, "State=DRAIN", "Reason=a disk is full")
    done = ndctl.submit(**REQUEUE_ON_DRAIN, **STEPS, **LONG_TIMEOUTS)
    assert done.code == 0, done.err
    ndctl.wait_for_step(step=3)
    both, drained = hosts_of(ndctl), other_than_the_leader(ndctl)
    drain(ndctl, drained, "a fan is loud")
    wait_for(lambda: "DRAINED" in ndctl.slurm_job()["Reason"], "the queue", LIMIT_S)
    job = ndctl.slurm_job()
    assert (job["JobState"], job["ExcNodeList"]) == ("PENDING", "(null)")
    assert "`sinfo -R` for the" in ndctl.status()["scheduler"]
    update(ndctl, drained, "State=RESUME")
    ndctl.wait_for_end(limit=END_S)

    assert [sorted(run) for run in hosts_of_runs(ndctl)] == [sorted(both), sorted(both)]
    assert_no_step_lost(ndctl)
    assert ndctl.losses() == uninterrupted_losses
    job = ndctl.slurm_job()
    assert (job["JobState"], job["Restarts"]) == ("COMPLETED", "1")
    ndctl.assert_nothing_left()
