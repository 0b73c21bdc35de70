"""What there is to tell about a job. Pure: it follows from the state, so a new leader finds the
same notices under the same keys, and the journal says which of them were sent."""

from collections.abc import Iterator

from msgspec import Struct

from orchestrator.contract.spec.reporting.notify_spec import (
    SEVERITIES,
    NotifySpec,
    Occasion,
    Severity,
)
from orchestrator.job.incident import Incident
from orchestrator.job.stage import Ended, Submitted
from orchestrator.job.state import Run

ALWAYS: tuple[Occasion, ...] = ("failed", "succeeded")
"""`quiet_for` does not silence these."""


class Notice(Struct, frozen=True, kw_only=True):
    key: str
    """Names the notice for all leaders of the job."""
    on: Occasion
    severity: Severity
    at: float
    incident: Incident | None = None


def notices_of(run: Run, now: float, stalled_after: float) -> Iterator[Notice]:
    """All notices since the job was last submitted, the oldest kinds first."""
    if run.job is None:
        return
    launch = run.job.launch.launch
    for incident in run.history.incidents:
        if incident.at < run.job.at:  # of an earlier submission
            continue
        severity: Severity = "info" if incident.drill else "warning"
        yield Notice(
            key=f"incident-{incident.id}",
            on="incident",
            severity=severity,
            at=incident.at,
            incident=incident,
        )
        if incident.recovered_after_s is not None:
            yield Notice(
                key=f"recovered-{incident.id}",
                on="recovered",
                severity="info",
                at=incident.at + incident.recovered_after_s,
                incident=incident,
            )
    last = run.history.incidents[-1] if run.history.incidents else None
    if isinstance(run.stage, Ended):
        if run.stage.ending != "CANCELLED":
            failed = run.stage.ending == "FAILED"
            yield Notice(
                key=f"ended-{launch}",
                on="failed" if failed else "succeeded",
                severity="critical" if failed else "info",
                at=run.stage.since,
                incident=last if failed else None,
            )
        return
    if run.history.fruitless >= run.job.max_restarts > 0:
        yield Notice(
            key=f"budget_low-{launch}-{run.attempt.number}",
            on="budget_low",
            severity="critical",
            at=last.at if last is not None else run.stage.since,
            incident=last,
        )
    since = max(run.progress.stepped_at, run.job.at)
    if not isinstance(run.stage, Submitted) and now - since > stalled_after:
        yield Notice(
            key=f"stalled-{launch}-{run.attempt.number}", on="stalled", severity="warning", at=since
        )


def wants(spec: NotifySpec, notice: Notice) -> bool:
    grave = SEVERITIES.index(notice.severity) >= SEVERITIES.index(spec.min_severity)
    return notice.on in spec.on and grave
