"""Observe, journal, decide: the thin shell around `step`. The leader performs the actions."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol, Self

from orchestrator.contract.messages.actions import Action
from orchestrator.contract.messages.events import Event, RankExited, Tick
from orchestrator.job.state import Run
from orchestrator.job.transitions import step
from orchestrator.journal.journal import BEGINNING, Decided, Entry, Place

Decide = Callable[[Run, Event], tuple[Run, tuple[Action, ...]]]
"""`step`, or a broken one of which a test wants to know whether it is caught."""


Tell = Callable[[Run, Event, Run], None]
"""Takes the state before an event, the event, and the state after it."""


class Lines(Protocol):
    """What a supervisor asks of a journal."""

    @property
    def place(self) -> Place: ...

    def after(self, place: Place) -> Iterable[Entry]: ...

    def extend(self, decided: Decided) -> tuple[Entry, ...]: ...


class OpenJournal(Lines, Protocol):
    """A journal that this process alone may write, until it leaves the context."""

    seq: int
    """Number of the last line."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Folded:
    """What the journal came to at some place."""

    run: Run = field(default_factory=Run)
    place: Place = BEGINNING


NOTHING = Folded()


class Supervisor:
    """Holds the journal and the state that is its fold."""

    def __init__(self, journal: Lines, decide: Decide = step, known: Folded = NOTHING) -> None:
        """`known`: of that journal, so that only what came after it is still to be folded."""
        self.journal, self.decide, self.known = journal, decide, known.place
        self.tell: Tell | None = None
        """Who hears of each line once it is on disk."""
        self.run = known.run
        for entry in journal.after(known.place):
            self.run, _ = decide(self.run, entry.event)

    @property
    def folded(self) -> Folded:
        """Between two decisions alone: within one, run and journal are not at the same place."""
        return Folded(run=self.run, place=self.journal.place)

    def feed(self, event: Event) -> tuple[Action, ...]:
        """The actions to perform; event and actions are on disk by then.

        Raises OSError, with nothing changed, when the journal cannot be written.
        """
        return self.take([event])[1]

    def take(self, events: Sequence[Event]) -> tuple[int, tuple[Action, ...]]:
        """Decide on `events`, up to the first by which something is to be done: how many those are,
        and the actions. All of them are on disk together by then.

        What comes after an action is decided when the action has been performed, as if events came
        one by one: a crash in between leaves nothing behind that one line at a time could not.

        Raises OSError, with nothing changed, when the journal cannot be written.
        """
        run, count, lines, changes = self.run, 0, [], []
        actions: tuple[Action, ...] = ()
        while count < len(events) and not actions:
            event, before = events[count], run
            run, actions = self.decide(before, event)
            if is_told(event, before, run):
                lines.append((event, actions))
                changes.append((before, event, run))
            count += 1
        if lines:
            self.journal.extend(lines)
        self.run = run
        if self.tell is not None:
            for change in changes:
                self.tell(*change)
        return count, actions


def is_told(event: Event, before: Run, after: Run) -> bool:
    """Whether the journal has a line of it. Of time that passes, and of the thousands of ranks that
    leave as they were told to, only where it changed something: a new leader folds every line."""
    mostly_nothing = isinstance(event, Tick) or (isinstance(event, RankExited) and event.stopped)
    return not mostly_nothing or after is not before
