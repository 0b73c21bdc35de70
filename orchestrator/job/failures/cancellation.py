"""A person cancels the job, or somebody cancels it in the scheduler.

People cancel jobs that hang, so a failure before the cancellation is still an incident, and a host
that broke gets its strike. Whatever exits after that may have exited because of the cancellation.
"""

from msgspec.structs import replace

from orchestrator.contract.messages.events import CancelRequested
from orchestrator.job.attempt_end import all_done, conclude, stop
from orchestrator.job.leave import Result, end
from orchestrator.job.stage import LIVE, Stopping
from orchestrator.job.state import Run


def cancel_requested(run: Run, event: CancelRequested) -> Result:
    if run.interruption.cancelled_by is not None:
        return run, ()
    return cancel(run, event.at, event.by)


def cancel(run: Run, at: float, by: str) -> Result:
    """Stop the ranks with time for a checkpoint, or end the job at once if no rank runs."""
    found = run.interruption.findings
    found = replace(found, before_cancel=True) if found is not None else None
    run = replace(run, interruption=replace(run.interruption, cancelled_by=by, findings=found))
    reason = f"cancelled by {by}"
    if isinstance(run.stage, LIVE):
        assert run.job is not None
        return stop(run, at, reason, run.job.stop_grace)
    if isinstance(run.stage, Stopping):
        return conclude(run, at) if all_done(run) else (run, ())
    return end(run, at, "CANCELLED", reason)
