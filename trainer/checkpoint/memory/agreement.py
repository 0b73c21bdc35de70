"""How many copies on other hosts all ranks have memory for."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist

from ndctl.rank.memory.available import available_bytes
from orchestrator.contract.memory.peers import HostMemory
from trainer.checkpoint.memory.slot import Layout, Slot
from trainer.rank.ranks import Ranks

ALONE, WITH_PARTNERS = 3, 4
"""Slots of a rank. One is written to the disk and one is copied to partners, while ranks go on with
the others."""
HELD = 2
"""Slots that a partner keeps of each rank: one is complete while the other is received."""
GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """Memory of one host, as one of its ranks sees it."""

    host: str
    local_ranks: int
    slot_bytes: int
    """Of one slot of this rank."""
    num_reserved: int
    """Slots of this rank that have their memory already."""
    held_bytes: int
    """What the host has reserved for copies of other hosts' slots."""
    available: int
    partners: int
    """Hosts to which its agent sends copies."""


def room_of(memory: HostMemory, layout: Layout, slots: Sequence[Slot], ranks: Ranks) -> Room:
    return Room(
        host=ranks.env.host,
        local_ranks=ranks.env.local_world_size,
        slot_bytes=layout.num_bytes,
        num_reserved=sum(slot.size == layout.num_bytes for slot in slots),
        held_bytes=memory.held_bytes,
        available=available_bytes(),
        partners=memory.copies,
    )


def rooms_of(
    memory: HostMemory, layout: Layout, slots: Sequence[Slot], ranks: Ranks
) -> Sequence[Room]:
    """That of each rank. A collective: all ranks look before one of them takes memory."""
    own = room_of(memory, layout, slots, ranks)
    rooms = [own] * ranks.env.world_size
    dist.all_gather_object(rooms, own)
    return rooms


def num_slots(copies: int) -> int:
    return WITH_PARTNERS if copies else ALONE


def agreed_copies(rooms: Sequence[Room]) -> tuple[int, str]:
    """Copies of each slot on other hosts, or -1 if not even the own slots fit; and why there are
    fewer than partners."""
    largest, why = max(room.slot_bytes for room in rooms), ""
    fewest = min(rooms, key=lambda room: room.partners)
    wanted, most = fewest.partners, max(room.partners for room in rooms)
    if wanted < most:
        # Its partner's agent did not say in time that it takes copies.
        why = f"{wanted} in place of {most} copies of each on other hosts, because"
        why += f" {fewest.host} has no more partners in this attempt"
    for copies in range(wanted, -1, -1):
        short = [room for room in rooms if _needed(room, copies, largest) > room.available]
        if not short:
            return copies, why
        first = short[0]
        need, have = _needed(first, copies, largest), first.available
        what = "no checkpoints in memory"
        if copies:
            what = f"less than {copies} {'copies' if copies > 1 else 'copy'} of each on other hosts"
        why = f"{what}: they need {need / GIB:.1f} GiB on {first.host}, and"
        why += f" {have / GIB:.1f} GiB are available"
    return -1, why


def _needed(room: Room, copies: int, largest: int) -> int:
    """Bytes that the host must still have.

    Args:
        largest: bytes of the largest slot of any rank. Stages of a pipeline differ.
    """
    own = max(0, num_slots(copies) - room.num_reserved) * room.slot_bytes
    held = copies * HELD * largest * room.local_ranks
    return own * room.local_ranks + max(0, held - room.held_bytes)
