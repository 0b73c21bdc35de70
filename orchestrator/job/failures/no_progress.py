"""Allocations without progress.

A job that never reaches a new checkpoint would be requeued for ever. It ends after
`resilience.max_allocations` allocations in a row without a new checkpoint.

Where hosts have successors, nothing is requeued, and a failed attempt counts as a restart. There,
leaders count instead: those lost in a row before they had started an attempt.
"""

from pathlib import Path

from msgspec.structs import replace

from orchestrator.contract.messages.events import LeaderStarted
from orchestrator.contract.times import date_time
from orchestrator.job.failures.policy import BEFORE_FIX
from orchestrator.job.stage import OUTSIDE, Submitted
from orchestrator.job.state import Run, has_successors

RULE = "max-allocations"
"""The name of this limit where a rule is named."""


def begun(run: Run, event: LeaderStarted) -> Run:
    """Counts the allocation that begins, and earlier ones in which no leader started."""
    new = event.allocation
    if new is None:
        return run
    if new.successor_s is not None:
        if not isinstance(run.stage, Submitted) and (isinstance(run.stage, OUTSIDE) or event.taken):
            return run  # the former leader ended in order, or the scheduler took it
        more = 1
    else:
        former = run.scheduler.allocation
        known = former is not None and former.id == new.id
        more = max(1, new.restarts - former.restarts) if known and former else 1
    since = run.history.allocations_since if run.history.allocations else event.at
    return replace(
        run,
        history=replace(
            run.history, allocations=run.history.allocations + more, allocations_since=since
        ),
    )


def was_saved(run: Run, at: float) -> Run:
    """The allocation before this one saved a checkpoint, and its leader died before it heard."""
    return replace(
        run,
        history=replace(
            run.history, allocations=min(run.history.allocations, 1), allocations_since=at
        ),
    )


def last_one(run: Run, how: str) -> str:
    """Why the job ends with this allocation, which ended as `how` says; empty if it continues."""
    return _words(run, run.history.allocations, how)


def one_too_many(run: Run) -> str:
    """The same for a new leader, if the former one could not say so. `run` is the state that the
    former leader left, with the new count."""
    led = not isinstance(run.stage, OUTSIDE)
    how = f"its leader was lost while {run.stage.title}" if led else "no leader started in it"
    return _words(run, run.history.allocations - 1, how)


def _words(run: Run, fruitless: int, how: str) -> str:
    job = run.job
    if job is None or job.max_allocations is None or fruitless < job.max_allocations:
        return ""
    what = "leader" if has_successors(run) else "allocation"
    saved = (
        f"the newest is step-{run.progress.saved}" if run.progress.saved else "there is none yet"
    )
    if run.progress.saved and run.progress.saved_at is not None:
        saved += f", of {date_time(run.progress.saved_at)}"
    many = f"{fruitless} {what}{'' if fruitless == 1 else 's'} in a row"
    if fruitless == 1:
        many = f"one {what}"
    return (
        f"{many}, since {date_time(run.history.allocations_since)}, made no new checkpoint"
        f" ({saved});"
        f" the last one ended: {how} (resilience.max_allocations {job.max_allocations})"
        f"{BEFORE_FIX}{_fix(run)}"
    )


def _fix(run: Run) -> str:
    name = Path(run.job.launch.run_dir).name if run.job else "JOB"
    look = f"`ndctl describe {name}` and `ndctl logs {name} --agents` say how they went"
    resume = f"the command that `ndctl status {name}` shows as the next step"
    if has_successors(run):
        return f"{look}; fix the cause, then resume with {resume}"
    key = "cluster.slurm.time" if run.job and run.job.backend == "slurm" else "the time limit"
    return (
        f"{look}; where there was too little time, raise {key} or lower checkpoint.every_steps;"
        f" then resume with {resume}"
    )
