"""Checkpoints in the memory of the simulated hosts, as ranks and agents keep them.

A host may complete its copy of a step late, as a rank does whose host is busy. No host begins the
next copy before all have completed the last one. With partners, agents send one step at a time to
other hosts, and each host ends that at its own time.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from random import Random

from msgspec import Struct

from orchestrator.contract.files.checkpoint_names import Made
from orchestrator.contract.memory.slot_file import Label, is_history
from orchestrator.contract.skipped_batches import Window, already_read
from orchestrator.simulation.world.storage import Checkpoint

LATE = 0.3
"""Part of the copies that complete only during the next step."""
ALONE, WITH_PARTNERS, HELD = 2, 3, 2


class Place(Struct, frozen=True):
    """Whose checkpoints a slot holds: other ranks, or ranks of another plan, cannot use them."""

    config: str
    node_rank: int
    nodes: int
    """Hosts of its attempt."""


class Copy(Struct, frozen=True):
    lineage: int
    place: Place
    content: Checkpoint
    shared: Made | None = None
    """As in `Label`."""

    @property
    def made(self) -> Made:
        return Made(step=self.content.step, attempt=self.content.attempt)

    def labels(self, ranks_per_host: int) -> Iterable[Label]:
        """Of the slots of the ranks of a host, which are one `Copy` here."""
        first = self.place.node_rank * ranks_per_host
        for rank in range(first, first + ranks_per_host):
            yield Label(
                lineage=self.lineage,
                made=self.made,
                rank=rank,
                ranks=self.place.nodes * ranks_per_host,
                config=self.place.config,
                shared=self.shared,
            )


@dataclass(slots=True)
class HostMemory:
    """The slots of a host, and what it holds for others. They exist as long as its agent."""

    complete: list[Copy] = field(default_factory=list)
    """The oldest first."""
    pending: Copy | None = None
    sending: Copy | None = None
    """Not overwritten: partners are getting it."""
    num_slots: int = ALONE
    others: list[Copy] = field(default_factory=list)
    """Fetched because an attempt with another number of hosts made them."""
    held: dict[int, list[Copy]] = field(default_factory=dict)
    """Node rank of another host -> copies of its slots."""
    holds: frozenset[int] = frozenset()
    """Node ranks whose copies it takes."""
    attempt: int = 0

    def begin(self, copy: Copy) -> None:
        """Overwrite the oldest slot, except for one that is being sent; not complete yet."""
        stay = [one for one in self.complete if one is self.complete[-1] or one is self.sending]
        room = self.num_slots - 1 - len(stay)
        others = [one for one in self.complete if one not in stay]
        kept = [*others[len(others) - room :], *stay] if room > 0 else stay
        self.complete = [one for one in self.complete if one in kept]
        self.pending = copy

    def finish(self) -> None:
        if self.pending is not None:
            self.complete.append(self.pending)
            self.pending = None

    def give_back(self) -> None:
        """The ranks of this attempt keep nothing any more."""
        self.keep_only(None)
        self.others, self.held, self.holds = [], {}, frozenset()

    def keep_only(self, kept: Copy | None) -> None:
        self.complete = [] if kept is None else [kept]
        self.pending = self.sending = None

    def keep(self, made: Made) -> None:
        """Another plan made what the ranks loaded. It stays until all have copies of their own."""
        kept = (copy for copy in self.complete if copy.made == made)
        self.keep_only(next(kept, None))

    def usable(self, lineage: int, place: Place, resumed: Sequence[Made]) -> dict[Made, Copy]:
        """The complete ones that ranks may resume from."""
        return {
            copy.made: copy
            for copy in self.complete
            if (copy.lineage, copy.place) == (lineage, place) and is_history(copy.made, resumed)
        }

    def allow(self, holds: Iterable[int], attempt: int) -> None:
        self.holds, self.attempt = frozenset(holds), attempt

    def receive(self, copy: Copy) -> bool:
        """Keep a copy of another host's slot; False if it is refused."""
        node = copy.place.node_rank
        if node not in self.holds or copy.content.attempt != self.attempt:
            return False
        held = self.held.get(node, [])
        if len(held) >= HELD:
            shared = [one for one in held if one.made == copy.shared]
            held = shared or [max(held, key=lambda one: one.made)]
        self.held[node] = [*held, copy]
        if copy.shared is not None and copy.shared.attempt == self.attempt:
            self.held = {node: held for node, held in self.held.items() if node in self.holds}
            self.others.clear()
        return True

    def all(self) -> list[Copy]:
        """What an agent offers: all complete slots and copies."""
        held = (copy for held in self.held.values() for copy in held)
        return [*self.complete, *self.others, *held]

    def put(self, copy: Copy) -> None:
        """Fetched from a partner before ranks start."""
        others = [one for one in self.complete if one.made != copy.made]
        self.complete = [*others[-1:], copy]


@dataclass(slots=True)
class Memories:
    """The memory of all hosts of an attempt, in node-rank order."""

    random: Random
    config: str
    attempt: int
    hosts: Sequence[HostMemory]
    lineage: int
    """As ordered; once ranks train, the lineage of their own copies."""
    resumed: Sequence[Made] = ()
    all_done: bool = True

    def newest(self, skip: Sequence[Window]) -> tuple[Copy, ...]:
        """The newest checkpoint that all hosts have, as the copy of each; empty: there is none."""
        if not self.lineage:
            return ()
        found = [
            host.usable(self.lineage, self._place(number), self.resumed)
            for number, host in enumerate(self.hosts)
        ]
        common = set(found[0]).intersection(*found[1:])
        whole = self._of_other_plans() | {made: [own[made] for own in found] for made in common}
        for _, one in sorted(whole.items(), reverse=True):
            content = one[0].content
            if not already_read(content.step, content.skipped, skip):
                return tuple(one)
        return ()

    def _place(self, number: int) -> Place:
        return Place(self.config, number, len(self.hosts))

    def _of_other_plans(self) -> dict[Made, Sequence[Copy]]:
        """Checkpoints of other plans that are complete on the hosts of this attempt, as a copy of
        each host of theirs."""
        parts: dict[Made, dict[int, Copy]] = defaultdict(dict)
        for copy in (copy for host in self.hosts for copy in host.all()):
            is_known = copy.lineage == self.lineage and is_history(copy.made, self.resumed)
            if is_known and copy.place.config != self.config:
                parts[copy.made][copy.place.node_rank] = copy
        return {
            made: [copies[number] for number in sorted(copies)]
            for made, copies in parts.items()
            if len(copies) == next(iter(copies.values())).place.nodes
        }

    def resume(self, found: Sequence[Copy], num_slots: int) -> None:
        """Training starts from `found`, or from the disk, and this attempt has a new lineage."""
        for number, host in enumerate(self.hosts):
            if found and found[0].place.config != self.config:
                host.keep(found[0].made)
            else:
                host.keep_only(found[number] if found else None)
            host.num_slots = num_slots
        if not found:
            self.lineage = self.attempt

    def begins(self, content: Checkpoint, shared: Made | None, *, unstable: bool) -> bool:
        """Handle the end of a step. Whether all hosts begin to copy it now."""
        if not self.all_done:
            self._finish(self.hosts)
            return False
        if unstable:
            return False
        for number, host in enumerate(self.hosts):
            host.begin(Copy(self.lineage, self._place(number), content, shared))
        self._finish(host for host in self.hosts if self.random.random() >= LATE)
        return True

    def begin_last(self, content: Checkpoint, shared: Made | None) -> None:
        """All hosts copy the step after which the attempt stops, and wait for each other."""
        self._finish(self.hosts)
        for number, host in enumerate(self.hosts):
            if not any(one.content == content for one in host.complete):
                host.begin(Copy(self.lineage, self._place(number), content, shared))
        self._finish(self.hosts)

    def _finish(self, hosts: Iterable[HostMemory]) -> None:
        for host in hosts:
            host.finish()
        self.all_done = all(host.pending is None for host in self.hosts)
