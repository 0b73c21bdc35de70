"""Whether ranks keep checkpoints in memory, and with how many copies on other hosts.

Only the hosts know how much memory they have, so this is decided at the start of an attempt, from
what all ranks report.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from ndctl.rank.memory.available import HostRoom, host_room
from orchestrator.contract.memory.peers import HostMemory
from orchestrator.contract.spec.job_spec import MOST_BY_DEFAULT, MemoryCheckpointSpec
from trainer.checkpoint.memory.slot import Layout, Slot
from trainer.rank.ranks import Ranks

ALONE, WITH_PARTNERS = 3, 4
"""Slots of a rank. One is written to the disk and one is copied to partners, while ranks go on with
the others."""
HELD = 2
"""Slots that a partner keeps of each rank: one is complete while the other is received."""
GIB = 1 << 30
MACHINE = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """Memory of one host, as one of its ranks sees it."""

    host: str
    machine: str
    """Hosts with the same one share its memory: agents of `backend: local`, or pods of one node."""
    slot_bytes: int
    """Of one slot of this rank."""
    reserved_bytes: int
    """What the slots of this rank have already."""
    held_bytes: int
    """What the host has reserved for copies of other hosts' slots."""
    memory: HostRoom
    partners: int
    """Hosts to which its agent sends copies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreed:
    """What all ranks do."""

    copies: int | None
    """Of each slot on other hosts; None: no checkpoints in memory."""
    host_bytes: int = 0
    """Memory that they take on the host with most."""
    why: str = ""
    """Why there are none, or fewer copies than partners."""


def room_of(memory: HostMemory, layout: Layout, slots: Sequence[Slot], ranks: Ranks) -> Room:
    try:
        machine, room = MACHINE.read_text().strip(), host_room()
    except (OSError, ValueError, KeyError):  # a sandbox that has no complete /proc
        machine, room = ranks.env.host, HostRoom(0, 0)
    return Room(
        host=ranks.env.host,
        machine=machine,
        slot_bytes=layout.num_bytes,
        reserved_bytes=sum(slot.size for slot in slots),
        held_bytes=memory.held_bytes,
        memory=room,
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


def agree(spec: MemoryCheckpointSpec, rooms: Sequence[Room]) -> Agreed:
    """Decide for all ranks, from the rooms of all. Pure."""
    why = ""
    fewest = min(rooms, key=lambda room: room.partners)
    wanted, most = fewest.partners, max(room.partners for room in rooms)
    if wanted < most:
        # Its partner's agent did not say in time that it takes copies.
        why = f"{wanted} in place of {most} copies of each on other hosts, because"
        why += f" {fewest.host} has no more partners in this attempt"
    share = MOST_BY_DEFAULT if spec.every == "auto" else None
    largest = max(room.slot_bytes for room in rooms)
    machines = _by(lambda room: room.machine, rooms)
    for copies in range(wanted, -1, -1):
        short = (_shortage(each, copies, largest, share) for each in machines)
        said = next(filter(None, short), "")
        if not said:
            hosts = _by(lambda room: room.host, rooms)
            most_bytes = max(_whole(each, copies, largest) for each in hosts)
            return Agreed(copies=copies, host_bytes=most_bytes, why=why)
        many = f"{copies} {'copies' if copies > 1 else 'copy'}"
        why = f"less than {many} of each on other hosts: {said}" if copies else said
    return Agreed(copies=None, why=why)


def _by(key: Callable[[Room], str], rooms: Sequence[Room]) -> Sequence[Sequence[Room]]:
    found: dict[str, list[Room]] = {}
    for room in rooms:
        found.setdefault(key(room), []).append(room)
    return [*found.values()]


def _shortage(rooms: Sequence[Room], copies: int, largest: int, share: float | None) -> str:
    """Why the memory of a machine does not suffice for its ranks; empty if it does.

    Args:
        largest: bytes of the largest slot of any rank. Stages of a pipeline differ.
        share: part of the memory that checkpoints may take; None: all that is available.
    """
    names = [*dict.fromkeys(room.host for room in rooms)]
    where = names[0] if len(names) == 1 else f"the machine of {names[0]} to {names[-1]}"
    held_bytes = sum(each[0].held_bytes for each in _by(lambda room: room.host, rooms))
    reserved_bytes = sum(room.reserved_bytes for room in rooms)
    own, held = _own(rooms, copies), _held(rooms, copies, largest)
    need = max(0, own - reserved_bytes) + max(0, held - held_bytes)
    # Hosts of one machine may have limits of their own. The smallest one counts for all, because
    # which of them share a limit is unknown.
    available = min(room.memory.available for room in rooms)
    if need > available:
        return f"they need {_gib(need)} on {where}, and {_gib(available)} are available"
    usable = min(room.memory.free for room in rooms) + reserved_bytes + held_bytes
    if share is not None and own + held > share * usable:
        return (
            f"they take {_gib(own + held)} on {where}, more than {share:.0%} of the {_gib(usable)}"
            " that can be used there; checkpoint.memory.every=on allows more"
        )
    return ""


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB"


def _whole(rooms: Sequence[Room], copies: int, largest: int) -> int:
    """Bytes that checkpoints take on the host of these ranks."""
    return _own(rooms, copies) + _held(rooms, copies, largest)


def _own(rooms: Sequence[Room], copies: int) -> int:
    return num_slots(copies) * sum(room.slot_bytes for room in rooms)


def _held(rooms: Sequence[Room], copies: int, largest: int) -> int:
    """A host keeps copies of as many ranks as it sends copies of."""
    return copies * HELD * largest * len(rooms)
