"""Back one checkpoint, and on without the data that training went astray on.

The steps after the checkpoint are made again, with what follows in the stream instead of what they
read before: the same data might lead to the same place. What is left out is in the journal with the
order to start, in each checkpoint from then on, and in the sample ledger.
"""

from collections.abc import Iterable
from dataclasses import replace

from orchestrator.contract.messages.events import RankExited
from orchestrator.contract.skipped_batches import Window, batch_of, merge_windows
from orchestrator.job.failures.policy import Decision
from orchestrator.job.plans import Rollback
from orchestrator.job.state import Run

MOST_FROM_ONE = 3
"""Rollbacks to one checkpoint: then it is not the data."""


def perform(run: Run, exits: Iterable[RankExited], decision: Decision) -> tuple[Run, Decision]:
    """The job before it went astray; or as it is, to be stopped, where that cannot be."""
    error = next((exited.error for exited in exits if exited.error), None)
    if error is None:
        return run, _refused(decision, "no rank said at which step it went astray")
    since, failed = error.since or error.step, error.step
    to = max((step for step in _known(run) if step < since), default=0)
    if why := _why_not(run, to, since):
        return run, _refused(decision, why)
    window = Window(
        first=batch_of(to, run.progress.skipped) + 1, last=batch_of(failed, run.progress.skipped)
    )
    before = replace(
        run,
        progress=replace(
            run.progress,
            saved=to,
            saved_at=None,
            saves=tuple(step for step in run.progress.saves if step <= to),
            skipped=merge_windows(run.progress.skipped, (window,)),
            rollbacks=(*run.progress.rollbacks, Rollback(to=to, since=since)),
        ),
    )
    reason = (
        f"back to {_name(to)} as attempt {run.attempt.number + 1}, and on without batches {window}"
        f" of the data, which steps {to + 1} to {failed} read"
    )
    return before, replace(decision, reason=reason)


def _why_not(run: Run, to: int, since: int) -> str:
    if since < 1:
        return "it failed before its first step, so no data had been read"
    if run.progress.saved and not to:
        return f"no checkpoint from before step {since} is known"
    if since in [former.since for former in run.progress.rollbacks]:
        return f"with other data, too, it went astray at step {since}"
    if [former.to for former in run.progress.rollbacks].count(to) >= MOST_FROM_ONE:
        return f"{MOST_FROM_ONE} rollbacks to {_name(to)} did not help"
    return ""


def _refused(decision: Decision, why: str) -> Decision:
    return replace(decision, action="stop", reason=f"the job was stopped: no rollback, {why}")


def _name(step: int) -> str:
    return f"checkpoint step-{step}" if step else "the beginning"


def _known(run: Run) -> tuple[int, ...]:
    """Checkpoints that there were; of a journal of an older ndctl the newest alone."""
    return run.progress.saves or ((run.progress.saved,) if run.progress.saved else ())
