"""Laws of checkpoints in memory: what ranks resume from there, and how soon partners have copies.

What was trained is known from the simulated ranks, and what the leader heard from the journal.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from msgspec.structs import replace

from orchestrator.contract.messages.events import TrainingResumed
from orchestrator.simulation.laws.law import require

if TYPE_CHECKING:
    from orchestrator.simulation.world.host_memory import Copy
    from orchestrator.simulation.world.world import World

REPAIR_STEPS = 40
"""Steps with all partners reachable after which all have copies of one of them. A step is sent in
about four steps."""


class MemoryLaws:
    def __init__(self, world: "World") -> None:
        self.world = world
        self.resumed_at: dict[int, int] = {}
        """Attempt -> step from which it resumed, as the leader heard."""

    def heard(self, event: TrainingResumed) -> None:
        self.resumed_at[event.attempt] = event.step

    def resumes(self, attempt: int, config: str, copies: Sequence["Copy"]) -> None:
        """Ranks of all hosts resume from these copies, in node-rank order."""
        if not copies:
            return
        first = copies[0]
        made = first.made
        require(
            all(copy.content == first.content for copy in copies),
            f"attempt {attempt} resumes from several checkpoints in memory at once",
        )
        places = [copy.place for copy in copies]
        whole = [replace(first.place, node_rank=node) for node in range(first.place.nodes)]
        require(
            places == whole,
            f"attempt {attempt} resumes from slots of other ranks, or not from those of all",
        )
        hosts = len(self.world.trainings[attempt].members)
        require(
            first.place.config != config or first.place.nodes == hosts,
            f"attempt {attempt} takes slots of {first.place.nodes} hosts for those of its {hosts}",
        )
        trained = self.world.trainings[made.attempt].batches
        require(
            first.content.batches == trained[: made.step],
            f"attempt {attempt} resumes from step {made.step} of attempt {made.attempt}, which"
            " trained other batches",
        )
        for later, step in self.resumed_at.items():
            require(
                not made.attempt < later < attempt or made.step <= step,
                f"attempt {attempt} resumes from step {made.step} of attempt {made.attempt}, but"
                f" attempt {later} started again from step {step}",
            )

    def repairs(self, attempt: int, steps_without: int) -> None:
        """Copies on partners exist in bounded time after an attempt began."""
        require(
            steps_without < REPAIR_STEPS,
            f"in {steps_without} steps of attempt {attempt} no step was copied to all partners",
        )
