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


def new_lines(before: Run, after: Run) -> list[host_strikes.Line]:
    """The strikes that follow from the last decision, and those that it withdraws."""
    assert after.job is not None
    known, now = before.history.incidents, after.history.incidents
    found: list[host_strikes.Line] = []
    if now is not known:
        found += [
            _withdrawn(old, after)
            for old, new in zip(known, now, strict=False)
            if old is not new and _counts(old) and new.culprit.host is None
        ]
        found += [_strike(new, after.job) for new in now[len(known) :] if _counts(new)]
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


def _withdrawn(incident: Incident, run: Run) -> host_strikes.Withdrawn:
    assert incident.culprit.host is not None
    assert run.job is not None
    return host_strikes.Withdrawn(
        at=run.last_at,
        host=incident.culprit.host,
        job=run.job.launch.job,
        attempt=incident.attempt,
        kind=incident.kind,
        submitted=run.job.at,
    )


def record(path: Path, line: host_strikes.Line) -> None:
    """Append a line to the file at `path`. Failures are only logged."""
    try:
        host_strikes.record(path, line)
    except OSError as exc:
        log.warning("failed to write a strike against %s: %s", line.host, exc)
        return
    # The line is on disk. That the file could not be shortened loses nothing.
    try:
        shed(path, line.at)
    except OSError as exc:
        log.info("failed to remove expired strikes from %s for now: %s", path, exc)
