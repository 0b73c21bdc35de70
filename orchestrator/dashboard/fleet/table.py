"""The table of all jobs."""

from collections.abc import Sequence

from orchestrator.dashboard import format
from orchestrator.dashboard.fleet.columns import NOTE, Column, Line, Look, Table
from orchestrator.dashboard.fleet.row import JobRow, RowState, is_trouble
from orchestrator.dashboard.fleet.summary import eta_s

DROPPED_FIRST = (
    "RUN DIR",
    "SCHEDULER",
    "GROUP",
    "RESTARTS",
    "EFFECTIVE",
    "BACKEND",
    "USER",
    "SIZE",
    "AGE",
    "ETA",
    "STEP",
)
"""First what `ndctl status JOB` shows anyway, last what says how far a job is."""
COLOURS: dict[RowState, Look] = {
    "RUNNING": {"fg": "green"},
    "STARTING": {"fg": "blue"},
    "PENDING": {"fg": "blue"},
    "SUBMITTED": {"fg": "blue"},
    "RECOVERING": {"fg": "yellow", "bold": True},
    "SUSPENDED": {"fg": "yellow"},
    "FAILED": {"fg": "red", "bold": True},
    "CANCELLED": {"fg": "yellow"},
    "SUCCEEDED": {"fg": "green"},
    "GONE": {"dim": True},
    "UNKNOWN": {"fg": "magenta"},
}


def _step(row: JobRow, now: float) -> str:
    return format.UNKNOWN if row.job is None else format.of_steps(row.job.step, row.job.steps)


def _eta(row: JobRow, now: float) -> str:
    left = None if row.job is None else eta_s(row.job, now)
    return format.UNKNOWN if left is None else format.short_duration(left)


def _effective(row: JobRow, now: float) -> str:
    share = None if row.job is None else row.job.effective_ratio
    return format.UNKNOWN if share is None else f"{share:.0%}"


def _restarts(row: JobRow, now: float) -> str:
    return format.UNKNOWN if row.job is None else str(row.job.restarts)


def _state(row: JobRow, now: float) -> str:
    as_of = None if row.job is None else row.job.as_of
    return row.state if as_of is None else f"{row.state} {format.short_duration(now - as_of)} ago"


def _scheduler(row: JobRow, now: float) -> str:
    told = None if row.job is None else row.job.scheduler
    return (told or format.UNKNOWN).split(":")[0]


def _age(row: JobRow, now: float) -> str:
    if not row.submitted_at:
        return format.UNKNOWN
    return format.short_duration(now - row.submitted_at)


def _note(row: JobRow, now: float) -> str:
    return f"archived: {row.note}".rstrip(": ") if row.archived else row.note


COLUMNS: Sequence[Column[JobRow]] = (
    Column("NAME", lambda row, now: row.name),
    Column("GROUP", lambda row, now: row.group, repeats=False),
    Column("USER", lambda row, now: row.user),
    Column("STATE", _state),
    Column("BACKEND", lambda row, now: row.backend),
    Column("SIZE", lambda row, now: f"{row.hosts}x{row.gpus // max(1, row.hosts)}", right=True),
    Column("STEP", _step, right=True),
    Column("ETA", _eta, right=True),
    Column("EFFECTIVE", _effective, right=True),
    Column("RESTARTS", _restarts, right=True),
    Column("AGE", _age, right=True),
    Column("SCHEDULER", _scheduler, repeats=False),
    Column("RUN DIR", lambda row, now: row.run_dir),
    Column(NOTE, _note, repeats=False),
)


def table(rows: Sequence[JobRow], now: float, width: int | None) -> list[Line]:
    """The head and a line per row. `width` in cells; None: unlimited, as for a pipe."""
    return TABLE.lines(rows, now, width)


def _look(title: str, row: JobRow, now: float) -> Look:
    if title == "STATE":
        return COLOURS[row.state]
    if title in ("RUN DIR", "SCHEDULER", "AGE") or row.archived:
        return {"dim": True}
    return {"bold": True} if title == "NAME" and is_trouble(row, now) else {}


TABLE = Table(columns=COLUMNS, dropped_first=DROPPED_FIRST, look=_look)
