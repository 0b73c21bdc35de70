"""What there is to tell about a job. Pure: it follows from the state, so a new leader finds the
same notices under the same keys, and the journal says which of them were sent."""

from collections.abc import Iterator, Mapping

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

ENDINGS: Mapping[str, Occasion] = {
    "FAILED": "failed",
    "SUCCEEDED": "succeeded",
    "CANCELLED": "cancelled",
}
ALWAYS = frozenset(ENDINGS.values())
"""`quiet_for` does not silence these."""


class Notice(Struct, frozen=True, kw_only=True):
    key: str
    """Names the notice for all leaders of the job."""
    on: Occasion
    severity: Severity
    at: float
    incident: Incident | None = None


def notices_of(run: Run, now: float, stalled_after: float, led_since: float) -> Iterator[Notice]:
    """All notices since the job was last submitted, the oldest kinds first.

    Args:
        led_since: when the present leader started.
    """
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
        if incident.resumed_after_s is not None:
            yield Notice(
                key=f"recovered-{incident.id}",
                on="recovered",
                severity="info",
                at=incident.at + incident.resumed_after_s,
                incident=incident,
            )
    last = run.history.incidents[-1] if run.history.incidents else None
    if isinstance(run.stage, Ended):
        failed = run.stage.ending == "FAILED"
        yield Notice(
            key=f"ended-{launch}",
            on=ENDINGS[run.stage.ending],
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
    since = _stands_since(run, led_since)
    if since is not None and now - since > stalled_after:
        yield Notice(
            key=f"stalled-{launch}-{run.attempt.number}", on="stalled", severity="warning", at=since
        )


def _stands_since(run: Run, led_since: float) -> float | None:
    """Since when the job should have made a step. None: nothing is expected of it."""
    # A program that never reports steps runs on all ranks: nothing shows that it stands still.
    if isinstance(run.stage, Submitted) or run.attempt.runs:
        return None
    # Hours in the queue of a scheduler, before this leader, are no stall.
    since = max(run.progress.stepped_at, led_since)
    if run.progress.stepped_at or not run.history.incidents:
        return since
    # A program without steps may have run for hours until its last incident.
    return max(since, run.history.incidents[-1].at)


def wants(spec: NotifySpec, notice: Notice) -> bool:
    grave = SEVERITIES.index(notice.severity) >= SEVERITIES.index(spec.min_severity)
    return notice.on in spec.on and grave
