"""Which checkpoints in memory partner hosts get copies of.

Agents send them. A rank only keeps the slot as it is until its agent has marked it, and tells all
ranks so in the totals of a step. It never waits.
"""

from collections.abc import Callable
from dataclasses import dataclass

from orchestrator.contract.files.checkpoint_names import Made
from orchestrator.contract.memory.slot_file import NOT_SENT, SENDING
from trainer.checkpoint.memory.slot import Slot


@dataclass(slots=True)
class Partners:
    """All ranks call each method, except for `announce`, at the same step."""

    copies: int
    """Partner hosts of each host; 0: nothing is sent."""
    tell: Callable[[int, Slot, int], None]
    """Tells the agent that a slot must be sent: step, slot, number of copies. It may be lost."""
    shared: Made | None
    """The newest checkpoint of which all ranks have copies on partner hosts."""
    slot: Slot | None = None
    """The slot that is being sent. Nothing writes to it."""
    made: Made | None = None
    """What it holds."""

    def begin(self, slot: Slot, made: Made) -> None:
        """Send `slot` once it is complete, if no other is being sent on any rank."""
        if self.copies and self.slot is None:
            self.slot, self.made = slot, made

    def announce(self, done: int | None) -> None:
        """Ask the agent to send the slot, until it has marked it.

        Args:
            done: step of this rank's newest complete slot.
        """
        slot, made = self.slot, self.made
        if slot is None or made is None or done is None or done < made.step:
            return
        if slot.mark == SENDING:
            self.tell(made.step, slot, self.copies)

    @property
    def has_ended(self) -> bool:
        """The agent of this rank sends nothing of it any more."""
        return self.slot is None or self.slot.mark != SENDING

    @property
    def has_failed(self) -> bool:
        """A partner of this host did not get its copy."""
        return self.slot is not None and self.slot.mark == NOT_SENT

    def after_step(self, *, all_ended: bool, failed: bool) -> None:
        """Handle what the totals of a step said of all ranks."""
        if self.slot is None or not all_ended:
            return
        if not failed:
            self.shared = self.made
        self.slot = self.made = None
