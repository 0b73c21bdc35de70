"""Observe, journal, decide: the thin shell around `step`. The leader performs the actions."""

from collections.abc import Callable, Sequence
from typing import Protocol

from orchestrator.contract.actions import Action
from orchestrator.contract.events import Event, Tick
from orchestrator.supervise.log import Entry
from orchestrator.supervise.state import Run
from orchestrator.supervise.step import step

Decide = Callable[[Run, Event], tuple[Run, tuple[Action, ...]]]
"""`step`, or a broken one of which a test wants to know whether it is caught."""


class Lines(Protocol):
    """What a supervisor asks of a journal."""

    @property
    def entries(self) -> Sequence[Entry]: ...

    def append(self, event: Event, actions: Sequence[Action] = ()) -> Entry: ...


class Supervisor:
    """Holds the journal and the state that is its fold."""

    def __init__(self, journal: Lines, decide: Decide = step) -> None:
        self.journal, self.decide = journal, decide
        self.run = Run()
        for entry in journal.entries:
            self.run, _ = decide(self.run, entry.event)

    def feed(self, event: Event) -> tuple[Action, ...]:
        """The actions to perform; event and actions are on disk by then.

        Raises OSError, with nothing changed, when the journal cannot be written.
        """
        after, actions = self.decide(self.run, event)
        if isinstance(event, Tick) and after is self.run:
            return ()
        self.journal.append(event, actions)
        self.run = after
        return actions
