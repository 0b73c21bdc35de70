"""Journals events and the decisions of `step` on them. The leader performs the actions."""

from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Protocol, Self

from msgspec import Struct, field

from orchestrator.contract.messages.actions import Action
from orchestrator.contract.messages.events import Event, RankExited, Tick
from orchestrator.job.state import Run
from orchestrator.job.transitions import step
from orchestrator.journal.journal import BEGINNING, Decided, Entry, Place

Decide = Callable[[Run, Event], tuple[Run, tuple[Action, ...]]]
"""`step`; in tests also a broken `step` that the laws must catch."""


Tell = Callable[[Run, Event, Run], None]
"""Called with the state before an event, the event, and the state after it."""


class Lines(Protocol):
    """What a supervisor needs from a journal."""

    @property
    def place(self) -> Place: ...

    def after(self, place: Place) -> Iterable[Entry]: ...

    def extend(self, decided: Decided) -> tuple[Entry, ...]: ...


class OpenJournal(Lines, Protocol):
    """A journal that only this process may write, until it leaves the context."""

    seq: int
    """Number of the last line."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None: ...


class Folded(Struct, frozen=True, kw_only=True):
    """The fold of the journal up to `place`."""

    run: Run = field(default_factory=Run)
    place: Place = BEGINNING


NOTHING = Folded()


class Supervisor:
    """Holds the journal and the state that is its fold."""

    def __init__(self, journal: Lines, decide: Decide = step, known: Folded = NOTHING) -> None:
        """`known` is the fold of a part of the journal; only later lines are folded here."""
        self.journal, self.decide, self.known = journal, decide, known.place
        self.tell: Tell | None = None
        """Called for each line after it is on disk."""
        self.run = known.run
        for entry in journal.after(known.place):
            self.run, _ = decide(self.run, entry.event)

    @property
    def folded(self) -> Folded:
        """Valid only between two decisions. During one, run and journal are at different lines."""
        return Folded(run=self.run, place=self.journal.place)

    def feed(self, event: Event) -> tuple[Action, ...]:
        """The actions to perform. Event and actions are on disk when this returns.

        Raises OSError, with nothing changed, if the journal cannot be written.
        """
        return self.take([event])[1]

    def take(self, events: Sequence[Event]) -> tuple[int, tuple[Action, ...]]:
        """Decide on `events` up to the first one that causes an action. Returns how many events
        were consumed, and the actions. All of them are on disk when this returns.

        Later events are decided after the action was performed, as if events arrived one by one. So
        a crash cannot leave a state that writing line by line could not.

        Raises OSError, with nothing changed, if the journal cannot be written.
        """
        run, count, lines, changes = self.run, 0, [], []
        actions: tuple[Action, ...] = ()
        while count < len(events) and not actions:
            event, before = events[count], run
            run, actions = self.decide(before, event)
            if is_journalled(event, before, run):
                lines.append((event, actions))
                changes.append((before, event, run))
            count += 1
        if lines:
            self.journal.extend(lines)
        # Set only now: if the write fails, the same events are decided again on the old state.
        self.run = run
        # After the write, so that a cluster never shows what a crash could still undo.
        if self.tell is not None:
            for change in changes:
                self.tell(*change)
        return count, actions


def is_journalled(event: Event, before: Run, after: Run) -> bool:
    """Whether the event gets a line in the journal. Ticks, and the thousands of ranks that exit
    because they were stopped, get one only if they changed the state: a new leader folds every
    line."""
    mostly_nothing = isinstance(event, Tick) or (isinstance(event, RankExited) and event.stopped)
    return not mostly_nothing or after is not before
