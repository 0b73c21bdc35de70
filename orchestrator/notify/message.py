"""A notice as text: what, where, since when, what ndctl did, what to type."""

from pathlib import PurePath
from typing import Any

from msgspec import Struct

from orchestrator.contract.visible import visible
from orchestrator.dashboard import format
from orchestrator.dashboard.command_hints import Commands
from orchestrator.dashboard.status import action_taken, recovery_text
from orchestrator.job.state import Run
from orchestrator.notify.notices import Notice
from orchestrator.notify.page_link import page_link

VERSION = 1
"""Version of the JSON that webhooks and commands get."""


class Message(Struct, frozen=True, kw_only=True):
    id: str
    """The same for a message that is sent twice, because a leader died between sending it and
    recording that."""
    title: str
    rows: tuple[tuple[str, str], ...]
    """Label and text."""
    body: dict[str, Any]
    """For programs."""

    @property
    def text(self) -> str:
        return "\n".join(f"{label}: {text}" for label, text in self.rows)


def message_of(
    notice: Notice, run: Run, commands: Commands, run_dir: str, page_url: str | None = None
) -> Message:
    """The job must have been submitted.

    Args:
        page_url: where people reach the page of all jobs; None: unknown.
    """
    assert run.job is not None
    name = run.job.launch.job
    title = f"{name}: {_headline(notice, run)}"
    rows = [*_rows(notice, run, commands, run_dir)]
    if page_url is not None:
        incident = notice.incident.id if notice.incident is not None else None
        rows.append(("page", page_link(page_url, PurePath(run_dir).name, incident)))
    safe = tuple((label, format.one_line(text)) for label, text in rows if text)
    key = f"{name}/{notice.key}/{run.job.at:.3f}"
    return Message(
        id=visible(key),
        title=format.shorten(title, 200),
        rows=safe,
        body={
            **{label.replace(" ", "_"): text for label, text in safe},
            "version": VERSION,
            "id": visible(key),
            "event": notice.on,
            "severity": notice.severity,
            "job": name,
            "state": run.state,
            "at": notice.at,
            "run_dir": run_dir,
            "step": max(run.attempt.step, run.progress.saved),
            "attempt": run.attempt.number,
            "reason": format.one_line(run.stage.reason),
            "title": format.shorten(title, 200),
        },
    )


def _headline(notice: Notice, run: Run) -> str:
    incident = notice.incident
    drill = " (a drill)" if incident is not None and incident.drill else ""
    match notice.on:
        case "incident" if incident is not None:
            return f"{incident.kind}: {incident.cause}{drill}"
        case "recovered" if incident is not None:
            after = format.duration(incident.resumed_after_s or 0.0)
            return f"recovered after {after} from {incident.kind}{drill}"
        case "failed":
            return f"FAILED: {format.split_fix(run.stage.reason)[0]}"
        case "succeeded":
            return "SUCCEEDED"
        case "cancelled":
            return f"CANCELLED: {run.stage.reason}"
        case "stalled":
            return f"no step since {format.date_time(notice.at, None)}"
        case _:
            return "the next incident ends the job: all restarts without a checkpoint are used"


def _rows(notice: Notice, run: Run, commands: Commands, run_dir: str) -> list[tuple[str, str]]:
    assert run.job is not None
    incident, job = notice.incident, run.job
    hosts = run.attempt.placement or run.plan.hosts
    where = (
        f"{format.count(run.plan.world_size, 'rank')} on {format.count(len(hosts), 'host')},"
        f" backend {job.backend}"
    )
    rows = [("state", f"{run.state}, {run.stage.reason}")]
    if incident is not None:
        if notice.on == "recovered":
            # It may be another one than was told first: the host of a lost agent may be cleared.
            rows.append(("cause", format.one_line(incident.cause)))
        rows += [
            ("who", format.culprit_text(incident.culprit)),
            ("ndctl did", action_taken(incident, "")),
            ("time", recovery_text(incident, run.state)),
            ("advice", incident.advice),
        ]
    step = max(run.attempt.step, run.progress.saved)
    rows += [
        ("since", format.date_time(notice.at, None)),
        ("progress", f"step {format.steps(step, job.steps)}, checkpoint {run.progress.saved}"),
        ("where", where),
        ("run dir", run_dir),
        ("type", commands.of("describe" if incident is not None else "status")),
    ]
    if notice.on == "failed":
        edits = incident.edits[0] if incident is not None and incident.edits else ""
        rows.append(("to resume", commands.submit(edits)))
    return rows
