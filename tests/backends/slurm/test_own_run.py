"""State of the run that an agent belongs to, and what the backend refuses after its end. With a
fake Slurm."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from orchestrator.backends.slurm import observe
from orchestrator.backends.slurm.backend import CLEAR_HOST_S, SlurmBackend
from orchestrator.backends.slurm.observe import SlurmJob
from orchestrator.contract.launch import LaunchPlan
from orchestrator.errors import BackendError, Ended, Unanswered
from orchestrator.seams import Completed
from tests.agent.world import TurnedClock
from tests.backends.handover import handover_of
from tests.backends.slurm.slurm_launch import DOWN, FakeJob, FakeSlurm, a_launch

ENVIRON = {
    "SLURM_JOB_ID": "1",
    "SLURM_JOB_NODELIST": "node[1-2]",
    "SLURM_RESTART_COUNT": "1",
    "SLURMD_NODENAME": "node2",
}
BOTH = ("node1", "node2")


def second_run(run_dir: Path) -> tuple[FakeSlurm, SlurmBackend, LaunchPlan, FakeJob]:
    """A job in its second run, seen from node2."""
    slurm, launch = FakeSlurm(), a_launch(run_dir)
    backend = SlurmBackend(ENVIRON, TurnedClock(), slurm)
    backend.submit(handover_of(launch))
    (job,) = slurm.jobs.values()
    job.restarts = 1
    slurm.calls.clear()
    return slurm, backend, launch, job


@pytest.mark.parametrize(
    ("change", "phase"),
    [
        ({"state": "RUNNING"}, "running"),
        ({"state": "SUSPENDED"}, "running"),
        ({"state": "COMPLETING"}, "ending"),
        ({"state": "COMPLETING", "reason": "JobLaunchFailure"}, "broken"),
        ({"state": "COMPLETING", "restarts": 2}, "queued again"),
        ({"state": "PENDING", "restarts": 2}, "queued again"),
        ({"state": "PENDING"}, "queued again"),
        ({"state": "PENDING", "reason": "JobHeldUser", "restarts": 2}, "queued again"),
        ({"state": "RUNNING", "restarts": 2}, "queued again"),
        ({"state": "CANCELLED"}, "over"),
        ({"state": "COMPLETED"}, "over"),
    ],
)
def test_the_state_of_a_run_is_known(change: dict[str, object], phase: str) -> None:
    job = replace(SlurmJob(id="1", state="?", restarts=1), **change)
    assert observe.phase(job, 1) == phase


def test_hosts_of_a_healthy_run_have_no_problem(tmp_path: Path) -> None:
    slurm, backend, launch, _ = second_run(tmp_path)
    slurm.nodes["node1"] = "ALLOCATED*"
    own = backend.own_run(launch, BOTH)
    assert (own.phase, own.words) == ("running", "Slurm job 1 is RUNNING")
    assert own.hosts == BOTH
    assert own.given_up == {}, "slurmd may only be stopped for an upgrade"


def test_hosts_that_slurm_marks_down_are_named(tmp_path: Path) -> None:
    slurm, backend, launch, job = second_run(tmp_path)
    slurm.nodes["node1"] = "DOWN*"
    assert list(backend.own_run(launch, BOTH).given_up) == ["node1"]
    slurm.nodes["node1"], job.nodes = "IDLE", "node2"
    output = backend.own_run(launch, BOTH).given_up
    assert output == {"node1": "Slurm removed it from the job"}


def test_no_host_is_named_for_a_run_that_is_over(tmp_path: Path) -> None:
    """A requeued job has no nodes, which is no problem of any host."""
    slurm, backend, launch, job = second_run(tmp_path)
    job.state, job.restarts, job.nodes = "PENDING", 2, ""
    own = backend.own_run(launch, BOTH)
    assert (own.phase, own.given_up) == ("queued again", {})
    slurm.jobs.clear()
    own = backend.own_run(launch, BOTH)
    assert (own.phase, own.words) == ("over", "Slurm no longer knows job 1")


def test_a_slurmctld_that_is_down_gives_no_state_of_the_run(tmp_path: Path) -> None:
    slurm, backend, launch, _ = second_run(tmp_path)
    slurm.intercept = lambda argv, before: DOWN
    with pytest.raises(Unanswered):
        backend.own_run(launch, BOTH)
    assert len(slurm.calls) == 1, "the caller repeats the query, not the backend"


# After the end of the run


@pytest.mark.parametrize(("state", "restarts"), [("PENDING", 2), ("COMPLETING", 2), ("RUNNING", 2)])
def test_no_agent_is_started_again_and_no_host_is_blamed_once_the_run_is_over(
    tmp_path: Path, state: str, restarts: int
) -> None:
    _, backend, launch, job = second_run(tmp_path)
    job.state, job.restarts, job.nodes = state, restarts, ""
    with pytest.raises(Ended, match="this run of the job is over: Slurm job 1 is"):
        backend.replace(launch, "node1")
    assert backend.notices(launch, BOTH) == ()


@pytest.mark.process
def test_an_srun_that_fails_at_the_end_of_the_run_does_not_blame_its_host(tmp_path: Path) -> None:
    slurm, backend, launch, job = second_run(tmp_path / "job")
    srun = tmp_path / "srun"
    srun.write_text("#!/bin/sh\necho 'Job is pending execution' >&2\nexit 1\n")
    srun.chmod(0o755)
    backend.environ = {**ENVIRON, "PATH": f"{tmp_path}:/usr/bin:/bin"}
    asked: list[int] = []

    def requeue_meanwhile(argv: list[str], before: int) -> Completed | None:
        if argv[:3] == ["scontrol", "show", "job"]:
            asked.append(before)
            if len(asked) == 2:
                job.state, job.restarts = "PENDING", 2
        return None

    slurm.intercept = requeue_meanwhile
    with pytest.raises(Ended, match="this run of the job is over"):
        backend.replace(launch, "node1")


@pytest.mark.parametrize("state", ["PENDING", "COMPLETING"])
def test_a_leader_that_did_not_requeue_the_job_keeps_its_excluded_nodes(
    tmp_path: Path, state: str
) -> None:
    """If slurmd of a node is dead, its agent outlives the run and takes the leader for lost."""
    slurm, backend, launch, job = second_run(tmp_path)
    job.state, job.restarts, job.excluded = state, 2, "node2"
    backend.requeue(launch, ("node1",))
    assert job.excluded == "node2"
    assert slurm.count("scontrol", "update") == slurm.count("scontrol", "requeue") == 0


# A new leader clears the host of the old one


def test_a_host_is_cleared_by_a_step_there(tmp_path: Path) -> None:
    slurm, backend, launch, _ = second_run(tmp_path)
    output = "its process 7 on node1 was still there (stopped by a signal) and was killed\n"
    slurm.intercept = lambda argv, before: Completed(0, output, "srun: warning: unrelated\n")
    assert backend.clear_host(launch, "node1") == output.strip()
    (argv,) = slurm.calls
    assert argv[0] == "srun"
    assert {"--jobid=1", "--overlap", "--nodelist=node1", "--nodes=1"} <= {*argv}
    assert argv[-3:] == [
        "orchestrator.backends.entry.slurm_clear_host",
        f"--run-dir={tmp_path}",
        "--host=node1",
    ]


def test_a_host_on_which_nothing_starts_is_reported_with_sruns_errors(tmp_path: Path) -> None:
    slurm, backend, launch, _ = second_run(tmp_path)
    err = "srun: no cpu binding here\nsrun: error: Task launch failed: Communication failure\n"
    slurm.intercept = lambda argv, before: Completed(1, "", err)
    with pytest.raises(BackendError) as failed:
        backend.clear_host(launch, "node1")
    assert failed.value.message == (
        "failed to clear node1: srun: error: Task launch failed: Communication failure"
    )


def test_a_step_that_does_not_end_is_abandoned(tmp_path: Path) -> None:
    def hang(argv: list[str], before: int) -> Completed | None:
        raise TimeoutError(f"srun did not end within {CLEAR_HOST_S:.0f} s")

    slurm, backend, launch, _ = second_run(tmp_path)
    slurm.intercept = hang
    with pytest.raises(BackendError, match="failed to start a step on node1: srun did not end"):
        backend.clear_host(launch, "node1")


# A job whose batch script was lost with its first node


@pytest.mark.parametrize(
    ("change", "ended"),
    [
        ({}, False),
        ({"nodes": "node2"}, True),
        ({"nodes": "node2", "restarts": 2}, False),
        ({"nodes": "node2", "state": "COMPLETING"}, False),
    ],
)
def test_a_job_whose_first_node_was_lost_is_ended_by_its_leader(
    tmp_path: Path, change: dict[str, object], ended: bool
) -> None:
    slurm, backend, launch, job = second_run(tmp_path)
    for name, value in change.items():
        setattr(job, name, value)
    backend.release(launch)
    assert slurm.count("scancel") == ended
