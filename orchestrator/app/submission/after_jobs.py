"""`ndctl submit --after JOB`: a job that starts when others have succeeded.

The local backend has a process that waits. Slurm gets a dependency. Kubernetes has nothing that
fits: an operator starts a job at once or when a queue admits it, whatever became of other jobs.
"""

from collections.abc import Sequence
from shlex import join

from msgspec.structs import replace

from orchestrator.app.remote import Found
from orchestrator.app.submission.payload import Submission
from orchestrator.errors import JobError
from orchestrator.job.state import Run
from orchestrator.journal.snapshot import replay


def with_after(submission: Submission, jobs: Sequence[Found]) -> Submission:
    """The submission that waits until all `jobs` have succeeded. Those that have need no wait.

    Raises:
        JobError: one can no longer succeed, or the backend cannot wait for it.
    """
    if any(found.run_dir.path.absolute() == submission.run_dir.path for found in jobs):
        name = submission.planned.spec.name
        raise JobError(f"--after {name}: a job cannot wait for itself", fix="name another job")
    waits = [found for found in jobs if not _succeeded(found)]
    if not waits:
        return submission
    backend = submission.planned.spec.cluster.backend
    if backend == "local":
        return _in_the_local_queue(submission, waits)
    if backend == "slurm":
        return _with_dependency(submission, waits)
    raise _cannot_wait(waits, "Kubernetes has no dependencies between jobs")


def _succeeded(found: Found) -> bool:
    run, name = replay(found.run_dir), found.run_dir.path.name
    if run.ending is not None and run.state != "SUCCEEDED":
        raise JobError(
            f"--after {name}: that job ended as {run.state}, so this one would never start",
            fix=f"resume it first, or leave out --after {name}",
        )
    return run.ending is not None


def _in_the_local_queue(submission: Submission, jobs: Sequence[Found]) -> Submission:
    if far := [found for found in jobs if found.copy is not None]:
        raise _cannot_wait(far, "the local queue reads run directories, and this one is in pods")
    return replace(submission, after=_paths(jobs))


def _paths(jobs: Sequence[Found]) -> tuple[str, ...]:
    return tuple(str(one.run_dir.path.absolute()) for one in jobs)


def _with_dependency(submission: Submission, jobs: Sequence[Found]) -> Submission:
    ids = [_slurm_id(found, replay(found.run_dir)) for found in jobs]
    # Agents look at these jobs again, because a cancelled job is COMPLETED for Slurm.
    submission = replace(submission, after=_paths(jobs))
    words = f"afterok:{':'.join(ids)}"
    return with_dependency(submission, words, "--kill-on-invalid-dep=yes")


def _slurm_id(found: Found, run: Run) -> str:
    from orchestrator.backends.slurm.job_lookup import recorded

    if run.job is None or run.job.backend != "slurm":
        raise _cannot_wait([found], "it is not a job of Slurm")
    job_id = recorded(run.job.launch)
    if job_id is None:
        raise _cannot_wait([found], "its Slurm job is not known here")
    return job_id


def with_dependency(submission: Submission, dependency: str, *more: str) -> Submission:
    """The submission with one more condition of sbatch, such as `afterok:12`."""
    planned = submission.planned
    slurm = planned.spec.cluster.slurm
    own = [flag for flag in slurm.sbatch_args if flag.startswith("--dependency=")]
    rest = [flag for flag in slurm.sbatch_args if flag not in own]
    waits = ",".join([*(flag.partition("=")[2] for flag in own), dependency])
    slurm = replace(slurm, sbatch_args=(*rest, *more, f"--dependency={waits}"))
    spec = replace(planned.spec, cluster=replace(planned.spec.cluster, slurm=slurm))
    return replace(submission, planned=replace(planned, spec=spec))


def _cannot_wait(jobs: Sequence[Found], why: str) -> JobError:
    names = [found.run_dir.path.name for found in jobs]
    return JobError(
        f"--after {', '.join(names)}: the scheduler cannot wait for it: {why}",
        fix=f"wait in the terminal: {join(['ndctl', 'wait', *names])} && ndctl submit …",
    )
