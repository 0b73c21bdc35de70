"""Checkpoints in the memory of the simulated hosts: two slots for each, as the trainer keeps them.

A host may complete its copy of a step late, as a rank does whose host is busy. No host begins the
next copy before all have completed the last one.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from random import Random

from msgspec import Struct

from orchestrator.contract.skipped_batches import Window, already_read
from orchestrator.simulation.world.storage import Checkpoint

LATE = 0.3
"""Part of the copies that complete only during the next step."""


class Place(Struct, frozen=True):
    """Whose checkpoints a slot holds: other ranks, or ranks of another plan, cannot use them."""

    config: str
    node_rank: int


class Copy(Struct, frozen=True):
    lineage: int
    place: Place
    content: Checkpoint


@dataclass(slots=True)
class HostMemory:
    """The slots of a host. They exist as long as its agent."""

    complete: list[Copy] = field(default_factory=list)
    """At most two, the older one first."""
    pending: Copy | None = None

    def begin(self, copy: Copy) -> None:
        """Overwrite the older slot; the copy is not complete yet."""
        self.complete = self.complete[-1:]
        self.pending = copy

    def finish(self) -> None:
        if self.pending is not None:
            self.complete.append(self.pending)
            self.pending = None

    def keep_only(self, kept: Copy | None) -> None:
        self.complete = [] if kept is None else [kept]
        self.pending = None

    def usable(self, lineage: int, place: Place) -> dict[int, Copy]:
        """Step -> copy, of the complete ones."""
        return {
            copy.content.step: copy
            for copy in self.complete
            if (copy.lineage, copy.place) == (lineage, place)
        }


@dataclass(slots=True)
class Memories:
    """The memory of all hosts of an attempt, in node-rank order."""

    random: Random
    config: str
    hosts: Sequence[HostMemory]
    lineage: int
    """As ordered; once ranks train, the lineage of their own copies."""
    all_done: bool = True

    def newest(self, skip: Sequence[Window]) -> Checkpoint | None:
        """The newest checkpoint that all hosts have."""
        if not self.lineage:
            return None
        found = [
            host.usable(self.lineage, Place(self.config, number))
            for number, host in enumerate(self.hosts)
        ]
        common = set(found[0]).intersection(*found[1:])
        contents = (found[0][step].content for step in sorted(common, reverse=True))
        fit = (one for one in contents if not already_read(one.step, one.skipped, skip))
        return next(fit, None)

    def resume(self, found: Checkpoint | None, attempt: int) -> None:
        """Training starts from `found`, or from the disk, and this attempt has a new lineage."""
        for number, host in enumerate(self.hosts):
            usable = host.usable(self.lineage, Place(self.config, number))
            host.keep_only(None if found is None else usable[found.step])
        if found is None:
            self.lineage = attempt

    def after_step(self, content: Checkpoint, *, unstable: bool) -> None:
        if not self.all_done:
            self._finish(self.hosts)
            return
        if unstable:
            return
        for number, host in enumerate(self.hosts):
            host.begin(Copy(self.lineage, Place(self.config, number), content))
        self._finish(host for host in self.hosts if self.random.random() >= LATE)
        self.all_done = all(host.pending is None for host in self.hosts)

    def _finish(self, hosts: Iterable[HostMemory]) -> None:
        for host in hosts:
            host.finish()
        self.all_done = all(host.pending is None for host in self.hosts)
