"""Reports on a terminal: colours, and long lines wrapped behind their label or their time.

A pipe gets the plain text. Lines with a command or a path are not wrapped, because a person copies
them: the terminal itself breaks them without a newline.
"""

import re
from collections.abc import Iterator
from typing import cast, get_args

from orchestrator.dashboard import format
from orchestrator.dashboard.fleet.columns import Line, Look, Piece
from orchestrator.dashboard.fleet.table import COLOURS
from orchestrator.job.stage import State

LABEL_WIDTH = 14
"""Cells before the text of a row, as `status.row` writes them."""
TITLE = re.compile(rf"(?P<name>\S+): (?P<state>{'|'.join(get_args(State))})\b(?P<rest>.*)")
ROW = re.compile(rf"(?P<label>  [a-z][a-z :]{{1,{LABEL_WIDTH - 3}}})(?P<text>\S.*)?")
TIME = re.compile(r"(?P<time>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d \S+)(?P<text>  \S.*)")
"""An event, as `event_text.event_line` writes it."""
COPIED = ("next", "see why", "run dir", "file", "fix:", "folder", "program", "group")
"""Rows that are not wrapped."""
COMMAND = re.compile(r"(?:^\s*|`|&& |: )ndctl [a-z]")
"""A command in another line. A sentence about ndctl itself is wrapped."""
TROUBLE = ("unhealthy", "straggler", "incident", "excluded", "ndctl did")
WIDE = 60
"""On a narrower terminal an event continues below its time, not behind it."""
LEAST = 40
"""A narrower terminal is treated as this wide."""


def report_lines(text: str, width: int) -> Iterator[Line]:
    for line in text.splitlines():
        for number, part in enumerate(_wrapped(line, max(LEAST, width))):
            yield _painted(part) if number == 0 else (Piece(part),)


def _wrapped(line: str, width: int) -> list[str]:
    row = ROW.fullmatch(line)
    is_copied = row["label"].strip() in COPIED if row else COMMAND.search(line)
    if len(line) <= width or is_copied:
        return [line]
    own = len(line) - len(line.lstrip())
    indent = LABEL_WIDTH if row or own >= LABEL_WIDTH else own + 2
    if event := TIME.fullmatch(line):
        # A narrow terminal would have a few letters left behind the time.
        indent = len(event["time"]) + 2 if width >= WIDE else 4
    return format.wrapped(
        line,
        width,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
        drop_whitespace=True,
    )


def _painted(line: str) -> Line:
    if title := TITLE.fullmatch(line):
        state = cast(State, title["state"])
        return (
            Piece(title["name"], {"bold": True}),
            Piece(": "),
            Piece(state, COLOURS[state]),
            Piece(title["rest"]),
        )
    if row := ROW.fullmatch(line):
        return (Piece(row["label"], _label_look(row["label"].strip())), Piece(row["text"] or ""))
    if event := TIME.fullmatch(line):
        return (Piece(event["time"], {"dim": True}), Piece(event["text"]))
    is_heading = line and not line.startswith(" ")
    return (Piece(line, {"bold": True} if is_heading else {}),)


def _label_look(label: str) -> Look:
    if label in TROUBLE:
        return {"fg": "yellow"}
    return {"fg": "cyan"} if label in ("next", "see why", "fix:") else {"dim": True}
