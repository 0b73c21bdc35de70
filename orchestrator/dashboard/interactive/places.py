"""Where a person is on the screen, and where a key leads. Pure: no terminal, no files."""

from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from orchestrator.dashboard.screen.grid import ALL_HOSTS
from orchestrator.dashboard.screen.rows import Frame

Kind = Literal[
    "fleet",
    "job",
    "hosts",
    "host",
    "rank",
    "logs",
    "events",
    "incident",
    "metrics",
    "stacks",
    "cancel",
    "help",
]
LETTERS: dict[str, Kind] = {
    "l": "logs",
    "i": "incident",
    "e": "events",
    "m": "metrics",
    "s": "stacks",
    "c": "cancel",
}
CONFIRMS = "y"
RANK = "rank:"
"""Before the number, in the key of a rank."""
END = 1 << 60


class Place(Struct, frozen=True, kw_only=True):
    """One page, and what is selected on it."""

    kind: Kind
    job: str = ""
    """Run directory."""
    host: str = ""
    rank: int | None = None
    number: int = 0
    """Of an incident: 0 is the newest, 1 the one before. Of stacks: how often they were asked."""
    selected: str = ""
    """Key of a row; a key that is not there means the first row."""
    top: int | None = None
    """First line in sight of a long text. None: its end, or the beginning of a page that does not
    grow."""
    needle: str = ""
    """Filter."""
    typing: bool = False
    """The filter is being typed."""


Stack = tuple[Place, ...]


class Pressed(Struct, frozen=True):
    stack: Stack
    """Empty: leave."""
    cancels: str = ""
    """Run directory of a job that the person wants to cancel, and has confirmed."""


def press(stack: Stack, key: str, character: str | None, frame: Frame, height: int) -> Pressed:
    """What a key does.

    Args:
        key: name of the key, as textual calls it.
        character: what it types, if that is one printable character.
        frame: the page as it is shown.
        height: lines of the screen.
    """
    here = stack[-1]
    if here.typing:
        return Pressed((*stack[:-1], _typed(here, key, character)))
    if here.kind == "cancel":
        # Only y confirms, and only once the question is on the screen, so that a key pressed by
        # mistake cancels nothing.
        confirmed = key == CONFIRMS and CONFIRMS in frame.keys
        return Pressed(stack[:-1], here.job if confirmed else "")
    if key in ("q", "escape"):
        return Pressed(_back(stack, key))
    if moved := _moved(here, key, frame, height):
        return Pressed((*stack[:-1], moved))
    return Pressed(_opened(stack, key, frame))


def click(stack: Stack, line: int, frame: Frame) -> Stack:
    """A click selects a row; a click on the selected row opens it."""
    found = frame.at.get(line)
    if found is None:
        return stack
    if found == selected(stack[-1], frame):
        return _opened(stack, "enter", frame)
    return (*stack[:-1], replace(stack[-1], selected=found))


def selected(here: Place, frame: Frame) -> str:
    """Key of the selected row; empty if nothing can be selected."""
    if here.selected in frame.keys:
        return here.selected
    return frame.keys[0] if frame.keys else ""


def _typed(here: Place, key: str, character: str | None) -> Place:
    if key == "enter":
        return replace(here, typing=False)
    if key == "escape":
        return replace(here, typing=False, needle="")
    if key == "backspace":
        return replace(here, needle=here.needle[:-1])
    if character is not None and character.isprintable():
        return replace(here, needle=here.needle + character)
    return here


def _back(stack: Stack, key: str) -> Stack:
    here = stack[-1]
    if here.needle and key == "escape":
        return (*stack[:-1], replace(here, needle=""))
    if len(stack) == 1:
        return () if key == "q" else stack
    return stack[:-1]


def _moved(here: Place, key: str, frame: Frame, height: int) -> Place | None:
    page = max(1, height - 4)
    by = {
        "up": -1,
        "k": -1,
        "down": 1,
        "j": 1,
        "pageup": -page,
        "ctrl+u": -page,
        "pagedown": page,
        "ctrl+d": page,
        "space": page,
        "home": -END,
        "g": -END,
        "end": END,
        "G": END,
        "upper_g": END,
    }.get(key)
    if by is None:
        return None
    if frame.keys:
        now = frame.keys.index(selected(here, frame))
        return replace(here, selected=frame.keys[min(len(frame.keys) - 1, max(0, now + by))])
    top = min(frame.last_top, max(0, frame.top + by))
    follows = here.kind in ("logs", "events") and top >= frame.last_top and by > 0
    return replace(here, top=None if follows else top)


def _opened(stack: Stack, key: str, frame: Frame) -> Stack:
    here, chosen = stack[-1], selected(stack[-1], frame)
    if key in ("question_mark", "?"):
        return stack if here.kind == "help" else (*stack, Place(kind="help", job=here.job))
    if key in ("slash", "/"):
        return _filtered(stack)
    if key == "enter":
        opened = _entered(here, chosen)
        return stack if opened is None else (*stack, opened)
    if here.kind == "incident" and key in ("n", "p", "left", "right"):
        step = 1 if key in ("p", "left") else -1
        return (*stack[:-1], replace(here, number=max(0, here.number + step), top=None))
    if here.kind == "stacks" and key == "s":
        return (*stack[:-1], replace(here, number=here.number + 1, top=None))
    if key in LETTERS and here.kind in ("fleet", "job", "hosts", "host", "rank"):
        return _lettered(stack, LETTERS[key], chosen)
    return stack


def _filtered(stack: Stack) -> Stack:
    here = stack[-1]
    if here.kind == "job":  # its hosts are what can be filtered
        return (*stack, Place(kind="hosts", job=here.job, typing=True))
    if here.kind in ("fleet", "hosts", "logs", "events"):
        return (*stack[:-1], replace(here, typing=True, selected=""))
    return stack


def _entered(here: Place, chosen: str) -> Place | None:
    if not chosen:
        return None
    match here.kind:
        case "fleet":
            return Place(kind="job", job=chosen)
        case "job" if chosen == ALL_HOSTS:
            return Place(kind="hosts", job=here.job)
        case "job" | "hosts":
            return Place(kind="host", job=here.job, host=chosen)
        case "host":
            rank = int(chosen.removeprefix(RANK))
            return Place(kind="rank", job=here.job, host=here.host, rank=rank)
        case _:
            return None


def _lettered(stack: Stack, kind: Kind, chosen: str) -> Stack:
    here = stack[-1]
    job = chosen if here.kind == "fleet" else here.job
    if not job:
        return stack
    host, rank = here.host, here.rank
    if here.kind in ("job", "hosts") and chosen != ALL_HOSTS:
        host = chosen
    if here.kind == "host" and chosen:
        rank = int(chosen.removeprefix(RANK))
    if kind == "logs":
        return (*stack, Place(kind=kind, job=job, host=host, rank=rank))
    return (*stack, Place(kind=kind, job=job))
