"""State of many jobs with one query, with a fake Slurm."""

import dataclasses
from pathlib import Path

import pytest
from msgspec.structs import replace

from orchestrator.backends.slurm import render
from orchestrator.backends.slurm.backend import SlurmBackend
from orchestrator.contract.launch import LaunchPlan
from orchestrator.contract.spec.slurm_spec import SlurmSpec
from orchestrator.seams import Completed, LaunchStatus
from tests.agent.world import TurnedClock
from tests.backends.handover import handover_of
from tests.backends.slurm.slurm_launch import DOWN, FakeSlurm, a_launch


def queued(slurm: FakeSlurm, root: Path, count: int) -> tuple[SlurmBackend, list[LaunchPlan]]:
    backend = SlurmBackend({}, TurnedClock(), slurm)
    launches = [replace(a_launch(root / f"job-{n}"), job=f"job-{n}") for n in range(count)]
    for launch in launches:
        backend.submit(handover_of(launch))
    slurm.calls.clear()
    return backend, launches


def test_one_query_covers_all_jobs(tmp_path: Path) -> None:
    slurm = FakeSlurm()
    backend, launches = queued(slurm, tmp_path, 50)
    slurm.jobs["2"].state = "PENDING"
    seen = backend.glance(launches)
    assert len(slurm.calls) == 1
    assert seen[0] == LaunchStatus("Slurm job 1 is RUNNING", held=True)
    assert [one.words for one in seen[1:3]] == ["Slurm job 2 is PENDING", "Slurm job 3 is RUNNING"]
    assert all(one.held for one in seen)


def test_an_ended_job_is_shown_with_its_state(tmp_path: Path) -> None:
    slurm = FakeSlurm()
    backend, launches = queued(slurm, tmp_path, 2)
    slurm.jobs["1"].state = "NODE_FAIL"
    del slurm.jobs["2"]
    assert backend.glance(launches) == [
        LaunchStatus("Slurm job 1 has ended: NODE_FAIL", held=False),
        LaunchStatus("Slurm job 2 has ended", held=False),
    ]
    assert len(slurm.calls) == 2, "one empty answer must not end the job"
    assert backend.glance([a_launch(tmp_path / "never")])[0].words is None


def test_a_job_that_was_cancelled_stays_so_when_slurm_has_forgotten_it(tmp_path: Path) -> None:
    slurm = FakeSlurm()
    backend, launches = queued(slurm, tmp_path, 2)
    slurm.jobs["1"].state, slurm.jobs["2"].state = "CANCELLED", "DEADLINE"
    seen = backend.glance(launches)
    assert seen == [
        LaunchStatus("Slurm job 1 has ended: CANCELLED", held=False, over="CANCELLED"),
        LaunchStatus("Slurm job 2 has ended: DEADLINE", held=False),
    ]
    slurm.jobs.clear()
    assert backend.glance(launches) == seen


def test_a_batch_script_that_could_not_write_is_named(tmp_path: Path) -> None:
    slurm = FakeSlurm()
    backend, (launch,) = queued(slurm, tmp_path, 1)
    slurm.jobs["1"].state, slurm.jobs["1"].reason = "FAILED", "JobLaunchFailure"
    ended = "Slurm job 1 has ended: FAILED (JobLaunchFailure)"
    words = f"{ended}: its batch script wrote nothing, so the first node probably cannot write to"
    for _ in range(2):
        (seen,) = backend.glance([launch])
        assert (seen.words or "").startswith(f"{words} {launch.run_dir}; ")
        slurm.jobs.clear()  # Slurm forgets the reason

    (render.folder(launch) / "1_batch.out").touch()
    assert backend.glance([launch])[0].words == ended


def test_a_suspended_job_is_shown_since_slurm_suspended_it(tmp_path: Path) -> None:
    slurm = FakeSlurm()
    backend, (launch,) = queued(slurm, tmp_path, 1)
    slurm.jobs["1"].state, slurm.jobs["1"].suspended = "SUSPENDED", 1000.0
    (seen,) = backend.glance([launch])
    assert (seen.at, seen.resume) == (1000.0, "scontrol resume 1")


def test_excluded_nodes_of_a_queued_job_are_shown_with_the_command_that_allows_each(
    tmp_path: Path,
) -> None:
    slurm = FakeSlurm()
    backend = SlurmBackend({}, TurnedClock(), slurm)
    launch = a_launch(tmp_path, slurm=SlurmSpec(exclude="node9"))
    backend.submit(handover_of(launch))
    slurm.jobs["1"].excluded = "node[2-3,9]"
    assert backend.glance([launch])[0].excluded == {}, "a running job needs no hint"
    slurm.jobs["1"].state = "PENDING"
    assert backend.glance([launch])[0].excluded == {
        "node2": "scontrol update JobId=1 ExcNodeList=node[3,9]",
        "node3": "scontrol update JobId=1 ExcNodeList=node[2,9]",
    }
    slurm.jobs["1"].excluded = "node2"
    told = {"node2": "scontrol update JobId=1 ExcNodeList="}
    assert backend.glance([launch])[0].excluded == told


def test_one_empty_answer_of_the_queue_is_not_trusted(tmp_path: Path) -> None:
    slurm = FakeSlurm()
    backend, launches = queued(slurm, tmp_path, 1)
    slurm.intercept = lambda argv, before: Completed(0, "", "") if before == 0 else None
    assert backend.glance(launches) == [LaunchStatus("Slurm job 1 is RUNNING", held=True)]


@pytest.mark.parametrize("hangs", [True, False])
def test_a_slurmctld_that_is_down_is_queried_once_and_briefly(tmp_path: Path, hangs: bool) -> None:
    def down(argv: list[str], before: int) -> Completed:
        if hangs:
            raise TimeoutError("squeue did not end within 4 s")
        return DOWN

    slurm = FakeSlurm()
    backend, launches = queued(slurm, tmp_path, 2)
    slurm.intercept, slurm.max_timeout = down, 5.0
    for one in backend.glance(launches):
        assert one.held
        assert "Slurm does not answer" in str(one.words)
    assert len(slurm.calls) == 1


def test_another_job_of_that_name_is_not_ours(tmp_path: Path) -> None:
    slurm = FakeSlurm()
    backend, (launch,) = queued(slurm, tmp_path, 1)
    slurm.jobs["7"] = dataclasses.replace(
        slurm.jobs["1"], id="7", command="/other.sh", comment="ndctl launch"
    )
    slurm.jobs["1"].restarts = 1
    assert backend.glance([launch])[0].words == "Slurm job 1 is RUNNING"
