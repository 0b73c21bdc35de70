"""The keys of the screen: what each does, and on which pages the footer names it."""

from collections.abc import Sequence

from msgspec import Struct
from rich.text import Text

from orchestrator.dashboard.interactive.places import Kind
from orchestrator.dashboard.theme import BOLD, DIM

LISTS: Sequence[Kind] = ("fleet", "job", "hosts", "host")
OF_JOB: Sequence[Kind] = ("fleet", "job", "hosts", "host", "rank")
TEXTS: Sequence[Kind] = ("logs", "events", "incident", "stacks", "help")


class Key(Struct, frozen=True, kw_only=True):
    sign: str
    """As people write it."""
    names: Sequence[str]
    """As textual calls it."""
    short: str
    """For the footer; empty: not there."""
    words: str
    pages: Sequence[Kind]


KEYS: Sequence[Key] = (
    Key(
        sign="?",
        names=("question_mark",),
        short="help",
        words="these keys, and what the signs mean",
        pages=(*OF_JOB, *TEXTS, "metrics"),
    ),
    Key(
        sign="⏎",
        names=("enter",),
        short="open",
        words="open what is selected: a job, a host, a rank; so does a click",
        pages=LISTS,
    ),
    Key(
        sign="↑ ↓",
        names=("up", "down", "k", "j"),
        short="",
        words="select, or scroll; also k and j, PageUp and PageDown, g and G for the two ends",
        pages=(),
    ),
    Key(
        sign="/",
        names=("slash",),
        short="filter",
        words="show only what has this text: jobs, hosts, lines; Enter keeps it, Esc ends it",
        pages=("fleet", "job", "hosts", "logs", "events"),
    ),
    Key(
        sign="l",
        names=("l",),
        short="logs",
        words="logs of the selected rank, host or job; they follow while the end is in sight",
        pages=OF_JOB,
    ),
    Key(
        sign="i",
        names=("i",),
        short="incident",
        words="the newest incident: evidence, decision, cost; p and n: the previous and the next",
        pages=OF_JOB,
    ),
    Key(
        sign="e",
        names=("e",),
        short="events",
        words="events and decisions in order of time",
        pages=OF_JOB,
    ),
    Key(
        sign="m",
        names=("m",),
        short="metrics",
        words="all curves, with restarts and checkpoints",
        pages=OF_JOB,
    ),
    Key(
        sign="s",
        names=("s",),
        short="stacks",
        words="where all ranks are now, as `ndctl snapshot`; the ranks go on",
        pages=OF_JOB,
    ),
    Key(
        sign="c",
        names=("c",),
        short="cancel",
        words="cancel the job, as `ndctl cancel`; it asks first",
        pages=OF_JOB,
    ),
    Key(
        sign="q",
        names=("q", "escape"),
        short="back",
        words="back, as Esc; on the first page q leaves, and ^C leaves everywhere",
        pages=(*OF_JOB, *TEXTS, "metrics"),
    ),
)


def footer(kind: Kind, *, is_first: bool, width: int) -> Text:
    """The keys of a page. A narrow screen gets them closer together, without the obvious one."""
    wide = _footer(kind, is_first, "  ")
    return wide if wide.cell_len <= width else _footer(kind, is_first, " ", left_out=("⏎",))


def _footer(kind: Kind, is_first: bool, gap: str, left_out: Sequence[str] = ()) -> Text:
    line = Text(" ")
    for key in KEYS:
        if kind in key.pages and key.short and key.sign not in left_out:
            line.append(key.sign, style=BOLD)
            word = "quit" if key.sign == "q" and is_first else key.short
            line.append(f" {word}{gap}", style=DIM)
    return line
