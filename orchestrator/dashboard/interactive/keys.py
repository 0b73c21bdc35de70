"""The keys of the screen: what each does, and on which pages the footer names it."""

from collections.abc import Sequence

from msgspec import Struct
from rich.text import Text

from orchestrator.dashboard.interactive.places import Kind
from orchestrator.dashboard.theme import BOLD, DIM

LISTS: Sequence[Kind] = ("fleet", "job", "hosts", "host")
OF_JOB: Sequence[Kind] = ("fleet", "job", "hosts", "host", "rank")
TEXTS: Sequence[Kind] = ("logs", "events", "incident", "stacks", "help")


class Key(Struct, frozen=True):
    sign: str
    """As people write it."""
    short: str
    """For the footer; empty: not there."""
    words: str
    pages: Sequence[Kind]


KEYS: Sequence[Key] = (
    Key("?", "help", "these keys, and what the signs mean", (*OF_JOB, *TEXTS, "metrics")),
    Key("⏎", "open", "open what is selected: a job, a host, a rank; so does a click", LISTS),
    Key(
        "↑ ↓",
        "",
        "select, or scroll; also k and j, PageUp and PageDown, g and G for the two ends",
        (),
    ),
    Key(
        "/",
        "filter",
        "show only what has this text: jobs, hosts, lines; Enter keeps it, Esc ends it",
        ("fleet", "job", "hosts", "logs", "events"),
    ),
    Key(
        "l",
        "logs",
        "logs of the selected rank, host or job; they follow while the end is in sight",
        OF_JOB,
    ),
    Key(
        "i",
        "incident",
        "the newest incident: evidence, decision, cost; p and n: the previous and the next",
        OF_JOB,
    ),
    Key("e", "events", "events and decisions in order of time", OF_JOB),
    Key("m", "metrics", "all curves, with restarts and checkpoints", OF_JOB),
    Key("s", "stacks", "where all ranks are now, as `ndctl snapshot`; the ranks go on", OF_JOB),
    Key("c", "cancel", "cancel the job, as `ndctl cancel`; it asks first", OF_JOB),
    Key(
        "q",
        "back",
        "back, as Esc; on the first page q leaves, and ^C leaves everywhere",
        (*OF_JOB, *TEXTS, "metrics"),
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
