"""`ndctl submit --after JOB`: which jobs can be waited for, and how each backend waits."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from orchestrator.app.remote import Found
from orchestrator.app.submission import after_jobs, payload, submit_job
from orchestrator.app.submission.after_jobs import with_after
from orchestrator.backends.entry.local_queue import wait_for
from orchestrator.contract.files.run_dir import RunDir
from orchestrator.contract.messages.events import CancelRequested, JobSubmitted
from orchestrator.errors import JobError
from tests.agent.world import TurnedClock
from tests.jobs_on_disk import JOB, NoCluster, cluster, events, lead, submission

__all__ = ["cluster"]


@pytest.fixture
def first(tmp_path: Path, cluster: NoCluster) -> Found:
    """A job that runs."""
    submit_job.submit(submission(tmp_path), {}, TurnedClock())
    lead(tmp_path)
    return Found(RunDir(tmp_path / JOB))


def cancel(root: Path) -> None:
    lead(root, CancelRequested(at=9.0, by="me"))


def on_slurm(one: payload.Submission, *args: str) -> payload.Submission:
    spec = one.planned.spec
    slurm = replace(spec.cluster.slurm, sbatch_args=args)
    spec = replace(spec, cluster=replace(spec.cluster, backend="slurm", slurm=slurm))
    return replace(one, planned=replace(one.planned, spec=spec))


def test_the_local_queue_gets_the_run_directories(first: Found, tmp_path: Path) -> None:
    second = with_after(submission(tmp_path, "name=second"), [first])
    submit_job.submit(second, {}, TurnedClock())
    (job,) = (
        one for one in events(tmp_path / ".." / tmp_path.name) if isinstance(one, JobSubmitted)
    )
    assert job.launch.after == ()
    told = payload.launch_of(second, 1)
    assert told.after == (str(tmp_path / JOB),)


def test_a_job_that_ended_otherwise_is_never_waited_for(first: Found, tmp_path: Path) -> None:
    cancel(tmp_path)
    with pytest.raises(JobError, match="ended as CANCELLED, so this one would never start"):
        with_after(submission(tmp_path, "name=second"), [first])


def test_a_job_cannot_wait_for_itself(first: Found, tmp_path: Path) -> None:
    with pytest.raises(JobError, match="cannot wait for itself"):
        with_after(submission(tmp_path, new=True), [first])


def test_slurm_gets_a_dependency_beside_those_of_the_spec(
    first: Found, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(after_jobs, "_slurm_id", lambda found, run: "12")
    second = on_slurm(submission(tmp_path, "name=second"), "--nice=5", "--dependency=after:9")
    told = with_after(second, [first, first]).planned.spec.cluster.slurm.sbatch_args
    assert told == ("--nice=5", "--kill-on-invalid-dep=yes", "--dependency=after:9,afterok:12:12")


def test_slurm_cannot_wait_for_a_job_elsewhere(first: Found, tmp_path: Path) -> None:
    with pytest.raises(JobError, match="it is not a job of Slurm") as refused:
        with_after(on_slurm(submission(tmp_path, "name=second")), [first])
    assert refused.value.fix == f"wait in the terminal: ndctl wait {JOB} && ndctl submit …"


def test_kubernetes_cannot_wait(first: Found, tmp_path: Path) -> None:
    second = submission(tmp_path, "name=second")
    spec = second.planned.spec
    spec = replace(spec, cluster=replace(spec.cluster, backend="kubernetes"))
    second = replace(second, planned=replace(second.planned, spec=spec))
    with pytest.raises(JobError, match="Kubernetes has no dependencies") as refused:
        with_after(second, [first])
    assert "ndctl wait" in refused.value.fix


def test_the_queue_stops_waiting_when_a_job_cannot_succeed_any_more(
    first: Found, tmp_path: Path
) -> None:
    class Clock(TurnedClock):
        def sleep(self, seconds: float) -> None:
            super().sleep(seconds)
            if self.now() > 1003 and not ended():
                cancel(tmp_path)

    def ended() -> bool:
        return any(isinstance(one, CancelRequested) for one in events(tmp_path))

    assert wait_for([str(first.run_dir.path)], Clock()) == f"{JOB} ended as CANCELLED"
    assert wait_for([str(tmp_path / "gone")], Clock()) == "gone was removed"
    assert wait_for([], Clock()) == ""
