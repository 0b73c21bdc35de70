"""A job is cancelled, as a person on call does when it hangs: what broke before is told, and a host
that broke has its strike. What ends after that may have ended of the stop. Pure.
"""

from dataclasses import replace

from orchestrator.contract.files import exit_codes
from orchestrator.contract.messages.events import RankExited
from orchestrator.job.failures.incident_records import first_cause, incident_of
from orchestrator.job.hosts.preemption import taken_by_scheduler
from orchestrator.job.state import Run, with_incident


def cancelled(run: Run, by: str) -> Run:
    found = (
        replace(run.interruption.findings, before_cancel=True)
        if run.interruption.findings is not None
        else None
    )
    return replace(run, interruption=replace(run.interruption, cancelled_by=by, findings=found))


def told(run: Run) -> Run:
    """With the incident of what had broken by then. Nobody's was a host that the scheduler took."""
    found = run.interruption.findings
    if found is None or not found.before_cancel:
        return run
    verdict = first_cause(run, found)
    if taken_by_scheduler(found, verdict):
        return run
    incident = incident_of(run, found, verdict, f"cancelled by {run.interruption.cancelled_by}")
    return with_incident(run, incident)


def did_not_hang(run: Run, event: RankExited) -> bool:
    """Whether ranks that were looked into for a hang as somebody cancelled have made their
    checkpoint instead: they were not stuck."""
    found = run.interruption.findings
    if run.interruption.cancelled_by is None or found is None or found.hang is None:
        return False
    others = found.exits or found.lost or found.stopped
    return event.exit_code == exit_codes.CHECKPOINTED and not others
