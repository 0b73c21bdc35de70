"""Observe, journal, decide: the thin shell around `step`. The leader performs the actions."""

from orchestrator.contract.actions import Action
from orchestrator.contract.events import Event, Tick
from orchestrator.supervise.log import Journal
from orchestrator.supervise.state import Run
from orchestrator.supervise.step import fold, step


class Supervisor:
    """Holds the journal and the state that is its fold."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self.run: Run = fold(entry.event for entry in journal.entries)

    def feed(self, event: Event) -> tuple[Action, ...]:
        """The actions to perform; event and actions are on disk by then.

        Raises OSError, with nothing changed, when the journal cannot be written.
        """
        after, actions = step(self.run, event)
        if isinstance(event, Tick) and after is self.run:
            return ()
        self.journal.append(event, actions)
        self.run = after
        return actions
