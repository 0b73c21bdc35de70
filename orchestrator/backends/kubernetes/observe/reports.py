"""Writes and reads a job's report in the places that Kubernetes users see: ConfigMap `JOB-state`,
an annotation of the job's events, and the output of ranks. Pure.

    state: RUNNING    step: "823"    steps: "5000"    attempt: "1"    launch: "1"
    updated: "2026-11-23T17:06:06Z"  message: attempt 1 trains
    checkpoint: "800"   culprit: rank 3 on node2   loss: "1.7865"
"""

import json
import math
import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime

from msgspec import Struct
from msgspec.structs import replace

from orchestrator.backends.kubernetes.mirror.pod_logs import RANKS_LINE
from orchestrator.backends.kubernetes.observe.object_fields import event_time, seconds_of
from orchestrator.backends.kubernetes.render.names import REPORT_ANNOTATION
from orchestrator.backends.kubernetes.resources import Object, lookup
from orchestrator.contract.codec import Invalid, decode
from orchestrator.contract.read_json import read_json
from orchestrator.job.reports.job_report import JobReport, report_of
from orchestrator.job.state import Run

MOST_TEXT = 512
"""Most characters of a message: annotations are shown in a table."""
NUMBERS = ("launch", "step", "steps", "attempt", "checkpoint")
STEP = re.compile(r"\bstep (?P<step>\d+)/\d+ loss (?P<loss>\S+)")
SAVED = re.compile(r"\bcheckpoint of step (?P<step>\d+) is complete")


def to_data(report: JobReport) -> dict[str, str]:
    """Writes every key each time, so that no value of an earlier report remains."""
    return {
        "launch": str(report.launch),
        "state": report.state,
        "step": str(report.step),
        "steps": str(report.steps),
        "attempt": str(report.attempt),
        "updated": stamp(report.updated),
        "message": _short(report.message),
        "checkpoint": str(report.checkpoint or ""),
        "culprit": _short(report.culprit),
        "loss": "" if report.loss is None else f"{report.loss:.4f}",
    }


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= MOST_TEXT else line[: MOST_TEXT - 1] + "…"


def from_data(data: Mapping[str, str]) -> JobReport | None:
    """None if the data is not a report."""
    try:
        numbers = {key: int(data.get(key) or 0) for key in NUMBERS}
        loss = data.get("loss") or None
        body = {
            **numbers,
            "state": data["state"],
            "message": data.get("message", ""),
            "culprit": data.get("culprit", ""),
            "updated": seconds_of(data["updated"]),
            "loss": None if loss is None else float(loss),
        }
        found: JobReport = decode(JobReport, body)
    except (KeyError, ValueError, TypeError, Invalid):
        return None
    return found


def stamp(at: float) -> str:
    """A timestamp in Kubernetes' format."""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def from_events(events: Iterable[Object], job: str) -> JobReport | None:
    """The newest report in an event about `job`. Events outlive the job by up to an hour."""
    mine = [one for one in events if lookup(one, ("involvedObject", "name")) == job]
    found = map(from_annotation, sorted(mine, key=event_time, reverse=True))
    return next((one for one in found if one is not None), None)


def from_annotation(item: Object) -> JobReport | None:
    """The report in the annotation of an event or of the ConfigMap, whose data may not be read."""
    said = lookup(item, ("metadata", "annotations", REPORT_ANNOTATION))
    try:
        body = read_json(str(said), most=4 * MOST_TEXT) if said else None
    except ValueError:
        return None
    return from_data(body) if isinstance(body, Mapping) else None


def to_annotation(report: JobReport) -> dict[str, str]:
    return {REPORT_ANNOTATION: json.dumps(to_data(report), ensure_ascii=False)}


class Printed(Struct, frozen=True, kw_only=True):
    """Training progress, parsed from the ranks' output."""

    attempt: int = 0
    step: int = 0
    loss: float | None = None
    at: float = 0.0
    checkpoint: int = 0


def printed(lines: Iterable[bytes], before: Printed | None = None) -> Printed:
    """Progress in timestamped lines of a pod's log. `before`: the result from other pods."""
    found = before or Printed()
    for line in lines:
        time, _, text = line.decode(errors="replace").partition(" ")
        match = RANKS_LINE.fullmatch(text)
        if match is None:
            continue
        if match["rank"] == "0" and (step := STEP.search(match["text"])):
            attempt, done = int(match["attempt"]), int(step["step"])
            if (attempt, done) >= (found.attempt, found.step):
                found = replace(
                    found, attempt=attempt, step=done, loss=_finite(step["loss"]), at=_at(time)
                )
        elif saved := SAVED.search(match["text"]):
            found = replace(found, checkpoint=max(found.checkpoint, int(saved["step"])))
    return found


def _finite(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _at(time: str) -> float:
    try:
        return seconds_of(time)
    except ValueError:
        return 0.0


def report_from(run: Run, found: Printed) -> JobReport | None:
    """The printed progress combined with the known state of the run; None if nothing was printed.
    Ranks that print steps are training, no matter what the last known state was."""
    if run.job is None or not found.at:
        return None
    known = report_of(run, found.at)
    return replace(
        known,
        state="RUNNING",
        message=f"attempt {found.attempt} trains, according to its ranks' output",
        attempt=max(known.attempt, found.attempt),
        step=max(known.step, found.step),
        checkpoint=max(known.checkpoint, found.checkpoint),
        loss=found.loss,
    )
