"""The backend of a job. The only place where the command line chooses one."""

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from orchestrator.contract.launch import LaunchPlan
from orchestrator.dashboard.scheduler_status import needs_no_scheduler
from orchestrator.job.hosts.host_pool import is_short
from orchestrator.job.stage import Submitted
from orchestrator.job.state import Run
from orchestrator.seams import Clock, LaunchStatus, Scheduler, SubmittingScheduler


def submitter_of(name: str, environ: Mapping[str, str], clock: Clock) -> SubmittingScheduler:
    from orchestrator.backends.by_name import submitter_named
    from orchestrator.system import run_command

    return submitter_named(name, environ, clock, run_command)


def scheduler_of(name: str, environ: Mapping[str, str], clock: Clock) -> Scheduler:
    from orchestrator.backends.by_name import scheduler_named
    from orchestrator.system import run_command

    return scheduler_named(name, environ, clock, run_command)


def clear(run: Run, environ: Mapping[str, str], clock: Clock) -> None:
    """End everything that is left of the launch."""
    if run.job is not None:
        scheduler_of(run.job.backend, environ, clock).clear(run.job.launch)


def standing(run: Run, environ: Mapping[str, str], clock: Clock) -> str | None:
    """What the scheduler still has of a job, as text; None: nothing."""
    if run.job is None:
        return None
    return scheduler_of(run.job.backend, environ, clock).standing(run.job.launch)


def starts_here(run: Run, environ: Mapping[str, str], clock: Clock) -> bool:
    """Whether agents on this machine have started, and none of them leads yet."""
    job = run.job
    if job is None or job.backend != "local" or not isinstance(run.stage, Submitted):
        return False
    (seen,) = scheduler_of(job.backend, environ, clock).glance([job.launch])
    return seen.running


def name_of(run: Run, environ: Mapping[str, str], clock: Clock) -> str | None:
    """The name of the job at its scheduler, from files."""
    if run.job is None:
        return None
    return scheduler_of(run.job.backend, environ, clock).name_of(run.job.launch)


def statuses_at_schedulers(
    jobs: Sequence[tuple[Run, bool, bool]], environ: Mapping[str, str], clock: Clock
) -> list[LaunchStatus]:
    """The state of each job at its scheduler.

    A scheduler is asked once for all jobs. It is not asked about jobs that ended, or that have a
    leader, are not quiet, and need no more hosts: the journal of those jobs is up to date.

    Args:
        jobs: each with whether its leader is alive, and whether it is quiet.
    """
    said: dict[int, LaunchStatus] = {}
    doubtful: dict[str, list[tuple[int, LaunchPlan]]] = {}
    for at, (run, led, quiet) in enumerate(jobs):
        if run.job is None or needs_no_scheduler(run, led):
            continue
        if run.ending is not None or (led and not quiet and not is_short(run)):
            backend = scheduler_of(run.job.backend, environ, clock)
            said[at] = LaunchStatus(backend.name_of(run.job.launch), held=False)
        else:
            doubtful.setdefault(run.job.backend, []).append((at, run.job.launch))
    for name, launches in doubtful.items():
        seen = scheduler_of(name, environ, clock).glance([launch for _, launch in launches])
        said |= {
            at: replace(one, held=one.held and not jobs[at][1])
            for (at, _), one in zip(launches, seen, strict=True)
        }
    return [said.get(at, LaunchStatus(None, held=False)) for at in range(len(jobs))]
