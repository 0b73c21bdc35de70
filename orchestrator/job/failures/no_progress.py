"""Allocations of which nothing came. Pure.

A job that never gets as far as a new checkpoint would go back to the queue for ever: it ends after
`resilience.max_allocations` of them in a row.

What counts as progress is a new checkpoint; a job that gets to its last step has ended. Where hosts
have successors nothing goes back to a queue, and an attempt that broke counts as a restart: there
it is leaders that count, of those that were lost one after the other before they had begun one.
"""

from dataclasses import replace
from datetime import UTC, datetime

from orchestrator.contract.messages.events import LeaderStarted
from orchestrator.job.hosts.host_pool import has_successors
from orchestrator.job.policy import BEFORE_FIX
from orchestrator.job.stage import OUTSIDE, Submitted
from orchestrator.job.state import Run

RULE = "max-allocations"
"""Names the limit where it decides, as if it were a rule."""


def begun(run: Run, event: LeaderStarted) -> Run:
    """With the allocation that begins, and those since the last one in which no leader began."""
    new = event.allocation
    if new is None:
        return run
    if new.successor_s is not None:
        if not isinstance(run.stage, Submitted) and (isinstance(run.stage, OUTSIDE) or event.taken):
            return run  # the leader before gave its place up, or the scheduler took it
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


def advanced(run: Run) -> Run:
    """A new checkpoint is complete."""
    return replace(run, history=replace(run.history, allocations=0))


def was_saved(run: Run, at: float) -> Run:
    """The allocation before this one made a checkpoint of which its leader did not hear."""
    return replace(
        run,
        history=replace(
            run.history, allocations=min(run.history.allocations, 1), allocations_since=at
        ),
    )


def last_one(run: Run, how: str) -> str:
    """Why the job ends with its present allocation, which ends by `how`; empty: it goes on."""
    return _words(run, run.history.allocations, how)


def one_too_many(run: Run) -> str:
    """The same where another allocation has begun, as nobody could say so at the end of the last.
    `run` is as that left it, but for the count."""
    led = not isinstance(run.stage, OUTSIDE)
    how = f"its leader was lost while {run.stage.title}" if led else "no leader began in it"
    return _words(run, run.history.allocations - 1, how)


def _words(run: Run, vain: int, how: str) -> str:
    job = run.job
    if job is None or job.max_allocations is None or vain < job.max_allocations:
        return ""
    what = "leader" if has_successors(run) else "allocation"
    saved = (
        f"the newest is step-{run.progress.saved}" if run.progress.saved else "there is none yet"
    )
    if run.progress.saved and run.progress.saved_at is not None:
        saved += f", of {_moment(run.progress.saved_at)}"
    many = f"{vain} {what}{'' if vain == 1 else 's'} in a row"
    if vain == 1:
        many = f"one {what}"
    return (
        f"{many}, since {_moment(run.history.allocations_since)}, made no new checkpoint ({saved});"
        f" the last one ended: {how} (resilience.max_allocations {job.max_allocations})"
        f"{BEFORE_FIX}{_fix(run)}"
    )


def _fix(run: Run) -> str:
    look = "`ndctl describe JOB` and `ndctl logs JOB --agents` say how they went"
    if has_successors(run):
        return f"{look}; once that is mended, `ndctl submit SPEC --resume` goes on"
    key = "cluster.slurm.time" if run.job and run.job.backend == "slurm" else "the time limit"
    return (
        f"{look}; where there was too little time, raise {key} or lower checkpoint.every_steps;"
        " then `ndctl submit SPEC --resume` goes on"
    )


def _moment(at: float) -> str:
    return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M} UTC"
