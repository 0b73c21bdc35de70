"""The state of a job as users see it, from its journal, its leader and its scheduler."""

from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from orchestrator.dashboard.job_view.replayed_job import ReplayedJob
from orchestrator.dashboard.metrics import NO_PROGRESS, Progress
from orchestrator.job.reports.job_report import JobReport
from orchestrator.job.stage import ENDED, State, Submitted
from orchestrator.job.state import Run
from orchestrator.seams import LaunchStatus

LEADER_START_S = 30.0
"""A leader that has not opened the journal after so long counts as failed to start."""


class Standing(Struct, frozen=True, kw_only=True):
    """The state of a job as users see it."""

    state: State
    reason: str
    since: float
    fix: str = ""
    """Command to type, if ndctl will do nothing by itself."""
    as_of: float | None = None
    """Unix time when the state was last known. None: the state is current."""


def heard_at(run: Run, progress: Progress) -> float:
    """Unix time of the last journal line or step."""
    last = progress.last
    return max(run.last_at, (last.time if last else None) or 0.0)


def awaited_jobs(run: Run) -> str:
    """Names of the jobs that a job in the local queue waits for; empty: it is not there."""
    if run.job is None or not isinstance(run.stage, Submitted):
        return ""
    return " and ".join(Path(run_dir).name for run_dir in run.job.launch.after)


def effective_state(
    job: ReplayedJob,
    leader_alive: bool,
    now: float,
    fix: str = "",
    launch_status: LaunchStatus | None = None,
    progress: Progress = NO_PROGRESS,
) -> Standing:
    """The state of a job, from its journal, its leader process and its scheduler.

    The journal alone is not enough: a job without a leader is not running, even if its journal
    ends with RUNNING, and a scheduler may have suspended its processes.

    Args:
        fix: the command that resubmits the job.
        launch_status: the scheduler's answer; None if there is no scheduler or it was not asked.
        progress: a job whose leader died has failed since its last step, which the journal may not
            have.
    """
    run, report = job.run, job.report
    if launch_status is not None and launch_status.resume and run.state not in ENDED:
        return Standing(
            state="SUSPENDED",
            reason=launch_status.words or "",
            since=max(run.last_at, launch_status.at or 0.0),
            fix=launch_status.resume,
        )
    if leader_alive and (awaited := awaited_jobs(run)):
        reason = f"starts when {awaited} has succeeded"
        return Standing(state="PENDING", reason=reason, since=run.stage.since)
    if run.state in ENDED or leader_alive:
        return Standing(state=run.state, reason=run.stage.reason, since=run.stage.since)
    if report is not None and report.state in ENDED:
        return Standing(state=report.state, reason=report.message, since=report.updated)
    heard = min(now, heard_at(run, progress))
    seen = None
    if launch_status is not None:
        seen = _scheduler_state(run, launch_status, report, heard, now)
    if seen is not None:
        return replace(seen, fix=fix) if seen.state == "FAILED" else seen
    # The job has no leader, and its scheduler does not know it.
    if isinstance(run.stage, Submitted) and now - run.stage.since < LEADER_START_S:
        return Standing(state=run.state, reason=run.stage.reason, since=run.stage.since)
    if isinstance(run.stage, Submitted):
        reason = "no leader started: the agent of the first host did not start, or ended at once"
    else:
        where = f" on {run.scheduler.leader}" if run.scheduler.leader else ""
        reason = f"the leader{where} died without recording a reason, in stage: {run.stage.title}"
    # The journal has few steps, so its last line may be days older than the death of the leader.
    since = run.last_at if isinstance(run.stage, Submitted) else heard
    return Standing(state="FAILED", reason=reason, since=since, fix=fix)


def _scheduler_state(
    run: Run, launch_status: LaunchStatus, report: JobReport | None, heard: float, now: float
) -> Standing | None:
    """The state of a job without a known leader according to its scheduler, if that tells it.

    Args:
        heard: as `heard_at` says.
    """
    words = launch_status.words or ""
    if launch_status.unknown:
        # The scheduler is unreachable and the job may still train: show the last known state.
        why, as_of = launch_status.unknown, max(heard, launch_status.at or 0.0)
        # The step of a report is among the metrics, so both may have the same time.
        if report is not None and report.updated >= as_of:
            return Standing(state=report.state, reason=why, since=as_of, as_of=report.updated)
        return Standing(state=run.state, reason=why, since=run.stage.since, as_of=as_of)
    if launch_status.over is not None:
        return Standing(state=launch_status.over, reason=words, since=launch_status.at or now)
    if launch_status.held:
        # Its processes run, so it waits for another leader and not for hosts.
        begun = launch_status.running and not isinstance(run.stage, Submitted)
        state: State = "RECOVERING" if begun else "PENDING"
        waits = max(run.last_at, launch_status.at or 0.0)  # it may have been requeued since
        return Standing(state=state, reason=words, since=heard if begun else waits)
    if words and isinstance(run.stage, Submitted):
        reason = f"no leader started: {words}"
        return Standing(state="FAILED", reason=reason, since=run.last_at)
    return None
