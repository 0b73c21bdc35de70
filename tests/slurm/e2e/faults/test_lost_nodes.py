"""Nodes fail with slurmd and all processes on them, and the job has no spare."""

import contextlib
import os
import signal
from collections.abc import Iterator

import pytest

from tests.e2e.job import wait_for
from tests.slurm.e2e.slurm_job import STEPS, SlurmNdctl, hosts_of, incidents

pytestmark = [pytest.mark.slurm, pytest.mark.process, pytest.mark.timeout(600)]

LOSS_TOLERANCE = 1e-3
"""Tolerance between float32 losses of two meshes some steps after the change."""


@pytest.mark.slow
@pytest.mark.parametrize("busy", [False, True])
def test_the_leaders_node_dies_and_a_new_leader_resumes(
    ndctl: SlurmNdctl, finished: SlurmNdctl, busy: bool
) -> None:
    """With `busy`, slurmctld does not answer the first request to requeue."""
    done = ndctl.submit()
    assert done.code == 0, done.err
    ndctl.wait_for_step(step=10)
    (leader,) = ndctl.leaders()
    others = {host for host in ndctl.allocated() if host != leader}
    ndctl.testbed.kill_node(leader)
    with stopped_slurmctld(ndctl) if busy else contextlib.nullcontext():
        # Agents wait agent_timeout (5 s), then send SIGTERM, and SIGKILL 3 s later.
        wait_for(lambda: not ndctl.ranks_on(others), f"the end of the ranks on {others}", 60.0)
        if busy:
            wait_for(
                lambda: "to requeue the job, retrying" in ndctl.agent_logs(),
                "a requeue request that fails",
                120.0,
            )
    ndctl.wait_for_end()

    assert ndctl.losses() == finished.losses()
    assert incidents(ndctl) == [("leader-lost", leader, None)]
    (incident,) = ndctl.status()["incidents"]
    assert leader in incident["cause"]
    saved = [event["step"] for event in ndctl.events("CheckpointSaved") if event["attempt"] == 1]
    assert incident["action"] == f"restart as attempt 2 from checkpoint step-{max(saved)}"
    assert len(ndctl.leaders()) == 2
    assert leader not in hosts_of(ndctl)
    job = ndctl.slurm_job()
    assert (job["JobState"], job["Restarts"]) == ("COMPLETED", "1")
    ndctl.assert_nothing_left()


@contextlib.contextmanager
def stopped_slurmctld(ndctl: SlurmNdctl) -> Iterator[None]:
    """slurmctld accepts connections but does not answer."""
    pid = int((ndctl.testbed.folder / "run" / "slurmctld.pid").read_text())
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@pytest.mark.slow
def test_a_lost_node_without_a_spare_is_excluded_from_the_next_allocation(
    ndctl: SlurmNdctl, finished: SlurmNdctl
) -> None:
    done = ndctl.submit()
    assert done.code == 0, done.err
    ndctl.wait_for_step(step=10)
    first, other = hosts_of(ndctl)
    gone = other if ndctl.leaders() == [first] else first
    ndctl.testbed.kill_node(gone)
    ndctl.wait_for_end()

    assert ndctl.losses() == finished.losses()
    assert incidents(ndctl) == [("host-lost", gone, None)]
    (requeue,) = [action for action in ndctl.actions() if action["kind"] == "Requeue"]
    assert requeue["exclude"] == [gone]
    assert requeue["reason"].startswith("1 of 2 hosts are left, and no spare")
    assert gone not in ndctl.allocated()
    job = ndctl.slurm_job()
    assert (job["JobState"], job["Restarts"]) == ("COMPLETED", "1")
    ndctl.assert_nothing_left()


@pytest.mark.slow
def test_a_job_that_may_shrink_resumes_on_one_host(ndctl: SlurmNdctl, finished: SlurmNdctl) -> None:
    done = ndctl.submit(resilience__shrink="true")
    assert done.code == 0, done.err
    ndctl.wait_for_step(step=10)
    first, other = hosts_of(ndctl)
    gone = other if ndctl.leaders() == [first] else first
    ndctl.testbed.kill_node(gone)
    ndctl.wait_for_end()

    assert incidents(ndctl) == [("host-lost", gone, None)]
    (event,) = ndctl.events("Replanned")
    before = ndctl.events("JobSubmitted")[0]["plan"]
    after = event["plan"]
    assert (before["mesh"]["dp_shard"], after["mesh"]["dp_shard"]) == (2, 1)
    assert _batch(after) == _batch(before) == 8
    assert len(hosts_of(ndctl)) == 1
    resumed = ndctl.events("TrainingResumed")[-1]["step"]
    uninterrupted_losses, shrunk = finished.losses(), ndctl.losses_of(attempt=2)
    assert sorted(shrunk) == list(range(resumed + 1, STEPS[-1] + 1))
    assert shrunk == pytest.approx(
        {step: uninterrupted_losses[step] for step in shrunk}, abs=LOSS_TOLERANCE
    )
    job = ndctl.slurm_job()
    assert (job["Restarts"], job["ExcNodeList"]) == ("0", "(null)")
    ndctl.assert_nothing_left()


def _batch(plan: dict[str, object]) -> int:
    """Samples in a step of all ranks."""
    mesh = plan["mesh"]
    assert isinstance(mesh, dict)
    copies: int = mesh["dp_replicate"] * mesh["dp_shard"]
    return copies * int(str(plan["micro_batch_size"])) * int(str(plan["gradient_accumulation"]))
