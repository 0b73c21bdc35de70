"""Copies of checkpoints in memory on partner hosts, during one attempt.

Agents send one step at a time. Each ends that at its own time, and fails if a partner is gone,
unreachable or refuses. The next step is sent when all have ended.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

from orchestrator.contract.files.checkpoint_names import Made
from orchestrator.simulation.world.host_memory import Copy, HostMemory

SLOW = 0.4
"""Part of the steps in which a host does not end what it sends."""
PartnerOf = Callable[[str, str], HostMemory | None]
"""The memory of a host, as another one reaches it."""


@dataclass(slots=True)
class Partners:
    random: Random
    hosts: Sequence[str]
    memories: Sequence[HostMemory]
    names: Sequence[Sequence[str]]
    """The partners of each host."""
    reach: PartnerOf
    shared: Made | None
    """The newest checkpoint of which all hosts have copies on partners."""
    copies: int = field(init=False)
    ended: dict[int, bool] = field(default_factory=dict)
    """Node rank -> whether its partners have the slot that is being sent."""
    steps_without: int = 0
    """Steps in a row in which copies could have arrived, but none was complete everywhere."""

    def __post_init__(self) -> None:
        # All ranks agree on the smallest number.
        self.copies = min(map(len, self.names))

    def begin(self) -> None:
        """All hosts have begun to copy a step: send that, unless another one is being sent."""
        if self.copies and all(memory.sending is None for memory in self.memories):
            for memory in self.memories:
                memory.sending = memory.pending or memory.complete[-1]

    def after_step(self) -> None:
        self.steps_without += self._all_reachable
        if not self.copies or any(memory.sending is None for memory in self.memories):
            return
        for number, memory in enumerate(self.memories):
            sending = memory.sending
            done = memory.pending is not sending and number not in self.ended
            if sending is not None and done and self.random.random() >= SLOW:
                self.ended[number] = self._send(number, sending)
        if len(self.ended) == len(self.memories):
            self._end()

    def end_all(self) -> bool:
        """All hosts send what they have to send, if they can. Whether all partners have it."""
        for number, memory in enumerate(self.memories):
            if memory.sending is not None and number not in self.ended:
                self.ended[number] = self._send(number, memory.sending)
        arrived = len(self.ended) == len(self.memories) and all(self.ended.values())
        self._end()
        return arrived

    def _end(self) -> None:
        """No host sends any more."""
        if self.ended and all(self.ended.values()):
            first = self.memories[0].sending
            self.shared = None if first is None else first.made
            self.steps_without = 0
        self.ended.clear()
        for memory in self.memories:
            memory.sending = None

    def _send(self, number: int, copy: Copy) -> bool:
        sent = True
        for name in self.names[number][: self.copies]:
            partner = self.reach(self.hosts[number], name)
            sent = partner is not None and partner.receive(copy) and sent
        return sent

    @property
    def _all_reachable(self) -> bool:
        return self.copies > 0 and all(
            self.reach(host, name) is not None
            for host, names in zip(self.hosts, self.names, strict=True)
            for name in names
        )
