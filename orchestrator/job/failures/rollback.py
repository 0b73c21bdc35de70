"""Rollback: resume from the checkpoint before the loss diverged, and skip the data since then.

The steps after that checkpoint are repeated with the data that follows in the stream, because the
same data might diverge again. The skipped batches are in the journal with the action that starts
the attempt, in each later checkpoint, and in the sample ledger.
"""

from collections.abc import Iterable

from msgspec.structs import replace

from orchestrator.contract.messages.events import RankExited
from orchestrator.contract.skipped_batches import Window, batch_of, merge_windows
from orchestrator.job.failures.policy import Decision
from orchestrator.job.plans import Rollback
from orchestrator.job.state import Run

MOST_FROM_ONE = 3
"""Rollbacks to one checkpoint, at most: after that the data is not the cause."""


def perform(run: Run, exits: Iterable[RankExited], decision: Decision) -> tuple[Run, Decision]:
    """The state before the divergence; or the decision to stop, if there is no way back."""
    errors = [exited.error for exited in exits if exited.error]
    # Peers that lost their connection to the first rank that stopped may report before it. Their
    # errors do not say since which step the loss is bad.
    error = min(errors, key=lambda one: one.since is None, default=None)
    if error is None:
        return run, _refused(decision, "no rank reported at which step the loss diverged")
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
        f"rollback to {_name(to)} as attempt {run.attempt.number + 1}, skipping batches {window} of"
        f" the data, which steps {to + 1} to {failed} read"
    )
    return before, replace(decision, reason=reason)


def _why_not(run: Run, to: int, since: int) -> str:
    if since < 1:
        return "it failed before its first step, so no data had been read"
    if run.progress.saved and not to:
        return f"no checkpoint from before step {since} is known"
    if since in [former.since for former in run.progress.rollbacks]:
        return f"the loss diverged at step {since} with other data too"
    if [former.to for former in run.progress.rollbacks].count(to) >= MOST_FROM_ONE:
        return f"{MOST_FROM_ONE} rollbacks to {_name(to)} did not help"
    return ""


def _refused(decision: Decision, why: str) -> Decision:
    return replace(decision, action="stop", reason=f"the job was stopped: no rollback, {why}")


def _name(step: int) -> str:
    return f"checkpoint step-{step}" if step else "the beginning"


def _known(run: Run) -> tuple[int, ...]:
    """Steps of known checkpoints. Journals of older versions have only the newest."""
    return run.progress.saves or ((run.progress.saved,) if run.progress.saved else ())
