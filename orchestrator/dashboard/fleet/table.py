"""The table of all jobs, fitted to the width of a terminal.

The name, the state and the note are what a person acts on, so they stay at any width. Other columns
are dropped in the order of `DROPPED_FIRST` until the note has room. A pipe has no width: every
column is printed in full.
"""

from collections.abc import Callable, Iterable, Sequence

from msgspec import Struct

from orchestrator.dashboard import format
from orchestrator.dashboard.fleet.row import JobRow, RowState, is_trouble
from orchestrator.dashboard.fleet.summary import effective_time, eta_s

GAP = "  "
LEAST_NOTE = 24
"""Columns are dropped until the note has so many cells."""
MOST_NAME = 40
"""Cells of a name on a terminal of 80 columns; more on a wider one."""
DROPPED_FIRST = (
    "RUN DIR",
    "SCHEDULER",
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
COLOURS: dict[RowState, dict[str, object]] = {
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


class Piece(Struct, frozen=True):
    """Text with one look, as `click.style` takes it."""

    text: str
    look: dict[str, object] = {}


Line = tuple[Piece, ...]


class Column(Struct, frozen=True):
    title: str
    cell: Callable[[JobRow, float], str]
    right: bool = False
    """Numbers are aligned at the right."""
    repeats: bool = True
    """Shown even if all rows have the same value."""


def _step(row: JobRow, now: float) -> str:
    return format.UNKNOWN if row.job is None else format.of_steps(row.job.step, row.job.steps)


def _eta(row: JobRow, now: float) -> str:
    left = None if row.job is None else eta_s(row.job, now)
    return format.UNKNOWN if left is None else format.short_duration(left)


def _effective(row: JobRow, now: float) -> str:
    share = None if row.job is None else effective_time(row.job, now)
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
    return format.short_duration(now - row.submitted_at)


def _note(row: JobRow, now: float) -> str:
    return f"archived: {row.note}".rstrip(": ") if row.archived else row.note


COLUMNS = (
    Column("NAME", lambda row, now: row.name),
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
    Column("NOTE", _note, repeats=False),
)


def table(rows: Sequence[JobRow], now: float, width: int | None) -> list[Line]:
    """The head and a line per row. `width` in cells; None: unlimited, as for a pipe."""
    cells = [[format.one_line(column.cell(row, now)) for column in COLUMNS] for row in rows]
    chosen = _chosen(cells, width)
    widths = {at: _width_of(at, cells, width) for at in chosen}
    lines = [_line([(COLUMNS[at].title, {"dim": True}) for at in chosen], chosen, widths, width)]
    for row, texts in zip(rows, cells, strict=True):
        looks = [(texts[at], _look(COLUMNS[at].title, row, now)) for at in chosen]
        lines.append(_line(looks, chosen, widths, width))
    return lines


def _chosen(cells: Sequence[Sequence[str]], width: int | None) -> list[int]:
    """The places of the columns to show."""
    shown = [at for at, column in enumerate(COLUMNS) if column.repeats or _differs(at, cells)]
    if width is None:
        return shown
    for title in DROPPED_FIRST:
        if _needed(shown, cells, width) <= width:
            break
        shown = [at for at in shown if COLUMNS[at].title != title]
    return shown


def _differs(at: int, cells: Sequence[Sequence[str]]) -> bool:
    return any(row[at] not in ("", format.UNKNOWN) for row in cells)


def _needed(shown: Sequence[int], cells: Sequence[Sequence[str]], width: int) -> int:
    widths = [_width_of(at, cells, width) for at in shown]
    note = [LEAST_NOTE - widths[-1]] if COLUMNS[shown[-1]].title == "NOTE" else [0]
    return sum(widths) + len(GAP) * (len(widths) - 1) + min(0, *note)


def _width_of(at: int, cells: Sequence[Sequence[str]], width: int | None) -> int:
    widest = max([len(COLUMNS[at].title), *(format.cells(row[at]) for row in cells)])
    if COLUMNS[at].title == "NAME" and width is not None:
        return min(widest, max(MOST_NAME // 2, width // 4))
    return widest


def _look(title: str, row: JobRow, now: float) -> dict[str, object]:
    if title == "STATE":
        return COLOURS[row.state]
    if title in ("RUN DIR", "SCHEDULER", "AGE") or row.archived:
        return {"dim": True}
    return {"bold": True} if title == "NAME" and is_trouble(row, now) else {}


def _line(
    looks: Iterable[tuple[str, dict[str, object]]],
    chosen: Sequence[int],
    widths: dict[int, int],
    width: int | None,
) -> Line:
    pieces, used = [], 0
    for (text, look), at in zip(looks, chosen, strict=True):
        room = widths[at] if width is None else min(widths[at], width - used)
        text, last = format.clip(text, room), at == chosen[-1]
        fill = " " * (room - format.cells(text))
        if COLUMNS[at].right:
            pieces += [Piece(fill), Piece(text, look)]
        else:
            pieces += [Piece(text, look), Piece("" if last else fill)]
        pieces.append(Piece("" if last else GAP))
        used += room + len(GAP)
    return tuple(piece for piece in pieces if piece.text)


def text_of(lines: Iterable[Line]) -> str:
    return "\n".join("".join(piece.text for piece in line).rstrip() for line in lines)
