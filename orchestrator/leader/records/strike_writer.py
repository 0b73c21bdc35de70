"""Records strikes against hosts that caused incidents, so that later jobs avoid these hosts."""

import logging
from pathlib import Path

from orchestrator import host_strikes
from orchestrator.contract.messages.events import JobSubmitted
from orchestrator.job.failures.policy import strike_weight
from orchestrator.job.hosts.straggler_replacement import strike_of
from orchestrator.job.incident import Incident, evidence_lines
from orchestrator.job.state import Run
from orchestrator.leader.records.strike_compaction import shed

log = logging.getLogger(__name__)


def new_strikes(before: Run, after: Run) -> list[host_strikes.Strike]:
    """The strikes that follow from the last decision."""
    assert after.job is not None
    fresh = after.history.incidents[len(before.history.incidents) :]
    found = [_strike(incident, after.job) for incident in fresh if _counts(incident)]
    slow = strike_of(before, after)
    return found if slow is None else [*found, slow]


def _counts(incident: Incident) -> bool:
    return incident.culprit.host is not None and strike_weight(incident) > 0


def _strike(incident: Incident, job: JobSubmitted) -> host_strikes.Strike:
    assert incident.culprit.host is not None
    return host_strikes.Strike(
        at=incident.at,
        host=incident.culprit.host,
        job=job.launch.job,
        attempt=incident.attempt,
        kind=incident.kind,
        cause=incident.cause,
        evidence=evidence_lines(incident),
        submitted=job.at,
        weight=strike_weight(incident),
    )


def record(path: Path, strike: host_strikes.Strike) -> None:
    """Append a strike to the file at `path`. Failures are only logged."""
    try:
        host_strikes.record(path, strike)
    except OSError as exc:
        log.warning("failed to write a strike against %s: %s", strike.host, exc)
        return
    # The strike is on disk. That the file could not be shortened loses nothing.
    try:
        shed(path, strike.at)
    except OSError as exc:
        log.info("failed to remove expired strikes from %s for now: %s", path, exc)
