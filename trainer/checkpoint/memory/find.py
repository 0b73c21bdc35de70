"""Finds the newest step of which a complete checkpoint is in the memory of the hosts.

If the same plan made it, each rank loads its own slot. If another plan did, ranks read parts of the
slots of all its ranks (`other_mesh.py`).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch.distributed as dist
from msgspec.structs import replace

from orchestrator.contract.files.checkpoint_names import Made, SkippedCheckpoint
from orchestrator.contract.memory.slot_file import is_history
from orchestrator.contract.skipped_batches import Window, already_read, batch_of
from trainer.checkpoint.memory.opened import OpenMemory
from trainer.checkpoint.memory.other_mesh import Held, Offered, OtherMesh, offers_of, open_other
from trainer.checkpoint.memory.slot import Header, Slot
from trainer.checkpoint.state import Progress
from trainer.rank.ranks import Ranks


@dataclass(frozen=True, slots=True)
class InMemory:
    """A step that all ranks can load."""

    slot: Slot | None
    """This rank's slot of it, which is the last one to be overwritten; None: it has none."""
    header: Header
    """Of that slot, or of one of another rank."""
    other: OtherMesh | None = None
    """Set if another mesh made it."""

    @property
    def progress(self) -> Progress:
        return Progress.from_json(self.header.progress)


def newest_in_memory(
    memory: OpenMemory, ranks: Ranks, skip: Sequence[Window]
) -> tuple[InMemory | None, tuple[SkippedCheckpoint, ...]]:
    """The newest step that is complete in memory, and the newer steps that are skipped, the same
    on every rank. A collective.

    Args:
        skip: data to skip; a step that has read some of it is not used.
    """
    own = _usable(memory, ranks.env.rank)
    found, history = [*_of_other_plans(memory)], memory.digests.history
    readable = [one for one in found if one.header.history == history]
    strange = [one.header.made for one in found if one.header.history != history]
    here = _Seen(sorted(own), bool(readable), strange, memory.memory.damaged)
    everyone = [here] * ranks.env.world_size
    dist.all_gather_object(everyone, here)
    common = set(everyone[0].own).intersection(*(one.own for one in everyone[1:]))
    offered = offers_of(readable, ranks) if any(one.others for one in everyone) else {}
    # The ranks of a host say the same.
    skipped = [*dict.fromkeys(passed for one in everyone for passed in one.damaged)]
    for made in sorted({*common, *offered}, reverse=True):
        usable: InMemory | None
        if made in common:
            why = _defect_on_any_rank(own[made], ranks, skip)
            usable = own[made]
        else:
            usable, why = _of_other_mesh(made, readable, offered[made], ranks, skip)
        if why is None:
            return usable, tuple(skipped)
        skipped.append(SkippedCheckpoint(f"step-{made.step} in memory", why))
    if strangers := {made.step for one in everyone for made in one.strange}:
        why = "it was made with another configuration or version"
        skipped.append(SkippedCheckpoint(f"step-{max(strangers)} in memory", why))
    return None, tuple(skipped)


class _Seen(NamedTuple):
    """What one rank has in memory."""

    own: Sequence[Made]
    """Its slots of this plan."""
    others: bool
    """It has slots of other plans, which can be read."""
    strange: Sequence[Made]
    """Slots of another configuration or version."""
    damaged: Sequence[SkippedCheckpoint]


def _usable(memory: OpenMemory, rank: int) -> Mapping[Made, InMemory]:
    return {
        header.made: InMemory(slot, header)
        for slot, header in _of_history(memory.slots, memory)
        if (header.config, header.rank) == (memory.digests.config, rank)
    }


def _of_history(slots: Sequence[Slot], memory: OpenMemory) -> Iterator[tuple[Slot, Header]]:
    """The complete slots of steps on which training still builds."""
    for slot in slots:
        header = slot.header()
        if header is None or header.lineage != memory.memory.lineage:
            continue
        if is_history(header.made, memory.memory.resumed):
            yield slot, header


def _of_other_plans(memory: OpenMemory) -> Iterator[Held]:
    """Slots of other plans that this rank reads for all ranks."""
    for slot, header in _of_history([*memory.slots, *memory.others], memory):
        if header.config != memory.digests.config:
            yield Held(slot, header, is_own=slot in memory.slots)


def _defect_on_any_rank(found: InMemory, ranks: Ranks, skip: Sequence[Window]) -> str | None:
    defects: list[str | None] = [None] * ranks.env.world_size
    dist.all_gather_object(defects, _defect(found, ranks, skip))
    return next((defect for defect in defects if defect), None)


def _defect(found: InMemory, ranks: Ranks, skip: Sequence[Window]) -> str | None:
    assert found.slot is not None
    if why := has_read(found.progress, skip):
        return why
    if not found.slot.is_sound(found.header):
        return (
            f"the copy of rank {ranks.env.rank} on {ranks.env.host} has changed since it was made"
        )
    return None


def has_read(progress: Progress, skip: Sequence[Window]) -> str | None:
    """A message if a checkpoint with this progress has already read some of the data to skip."""
    read = already_read(progress.step, progress.skipped, skip)
    if not read:
        return None
    last = batch_of(progress.step, progress.skipped)
    return f"it has read batches up to {last}, but batches {read[0]} must be skipped"


def _of_other_mesh(
    made: Made,
    readable: Sequence[Held],
    offered: Offered,
    ranks: Ranks,
    skip: Sequence[Window],
) -> tuple[InMemory | None, str | None]:
    held = [one for one in readable if one.header.made == made]
    opened, why = open_other(held, offered, ranks)
    if opened is None:
        return None, why
    header = replace(opened.headers[0], shared=made)
    own = next((one.slot for one in held if one.is_own), None)
    return InMemory(own, header, opened), has_read(Progress.from_json(header.progress), skip)
