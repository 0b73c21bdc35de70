"""Reads a checkpoint in memory that ranks of another mesh made.

Its slots lie on the hosts of this attempt, where its ranks ran, or copies of them. Each rank serves
some: it sends the parts that other ranks need. torch's planner of distributed checkpoints decides
which parts those are, as it does for a checkpoint on the disk.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from orchestrator.contract.files.checkpoint_names import Made
from trainer.checkpoint.memory.slot import Entry, Header, Slot, dtype_of
from trainer.rank.ranks import Ranks

ROUND_BYTES = 256 << 20
"""What a rank receives at once. It needs that much memory in addition."""
T = TypeVar("T")
Offered = Mapping[int, Sequence[int]]
"""Rank of the other mesh -> ranks of this one that have its slot."""


@dataclass(frozen=True, slots=True)
class Held:
    """A slot of another mesh that this rank can read."""

    slot: Slot
    header: Header
    is_own: bool
    """It is one of the slots that this rank writes to."""


class Part(msgspec.Struct, frozen=True, array_like=True):
    """A part of a tensor in a slot, which a rank asks another one for."""

    rank: int
    """Of the other mesh: whose slot."""
    entry: int
    """Position in the slot's table."""
    at: tuple[int, ...]
    """Where the part begins in the slot's shard."""
    shape: tuple[int, ...]


PARTS = msgspec.msgpack.Decoder(list[Part])


def offers_of(held: Sequence[Held], ranks: Ranks) -> Mapping[Made, Offered]:
    """The checkpoints of which the slots of all ranks are somewhere. A collective."""
    own = [(one.header.made, one.header.rank, one.header.ranks) for one in held]
    everyone: list[list[tuple[Made, int, int]]] = [[]] * ranks.env.world_size
    dist.all_gather_object(everyone, own)
    offered: dict[Made, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    sizes: dict[Made, int] = {}
    for server, slots in enumerate(everyone):
        for made, rank, count in slots:
            offered[made][rank].append(server)
            sizes[made] = count
    return {made: of for made, of in offered.items() if of.keys() == set(range(sizes[made]))}


def open_other(
    held: Sequence[Held], offered: Offered, ranks: Ranks
) -> tuple["OtherMesh | None", str]:
    """The checkpoint of which this rank has `held`; None with the reason if the only slot of a rank
    is damaged. A collective."""
    sound = {one.header.rank: one for one in held if one.slot.is_sound(one.header)}
    damaged = [one.header.rank for one in held if one.header.rank not in sound]
    everyone: list[tuple[str, list[int]]] = [("", [])] * ranks.env.world_size
    dist.all_gather_object(everyone, (ranks.env.host, damaged))
    servers: dict[int, int] = {}
    for rank, having in offered.items():
        good = [server for server in having if rank not in everyone[server][1]]
        if not good:
            host = everyone[having[0]][0]
            return None, f"the copy of rank {rank} on {host} has changed since it was made"
        servers[rank] = good[rank % len(good)]
    mine = {rank: one for rank, one in sound.items() if servers[rank] == ranks.env.rank}
    headers: list[dict[int, Header]] = [{}] * ranks.env.world_size
    dist.all_gather_object(headers, {rank: one.header for rank, one in mine.items()})
    return (
        OtherMesh(
            slots={rank: one.slot for rank, one in mine.items()},
            headers={rank: header for each in headers for rank, header in each.items()},
            servers=servers,
            ranks=ranks,
        ),
        "",
    )


@dataclass(slots=True)
class OtherMesh(StorageReader):
    """A complete checkpoint in slots of another mesh. All ranks load it together."""

    slots: Mapping[int, Slot]
    """Rank of the other mesh -> its slot, of those that this rank serves."""
    headers: Mapping[int, Header]
    """Of all ranks of the other mesh."""
    servers: Mapping[int, int]
    """Rank of the other mesh -> the rank of this one that serves its slot."""
    ranks: Ranks
    where: Mapping[tuple[str, tuple[int, ...]], Sequence[tuple[int, int]]] = field(init=False)
    """Name of a tensor and begin of a shard -> the ranks of the other mesh that have that shard,
    and its position in their tables."""

    def __post_init__(self) -> None:
        where: dict[tuple[str, tuple[int, ...]], list[tuple[int, int]]] = defaultdict(list)
        for rank, position, entry in self._entries():
            where[entry.name, entry.at].append((rank, position))
        self.where = where

    def _entries(self) -> Iterator[tuple[int, int, Entry]]:
        """All shards that are not empty."""
        for rank, header in sorted(self.headers.items()):
            for position, entry in enumerate(header.table):
                if math.prod(entry.shape):
                    yield rank, position, entry

    @property
    def world_size(self) -> int:
        return len(self.headers)

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """Shape of each tensor."""
        tables = (header.table for header in self.headers.values())
        return {entry.name: torch.Size(entry.whole) for table in tables for entry in table}

    # As torch calls it

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        chunks: dict[str, list[ChunkStorageMetadata]] = {name: [] for name in self.shapes}
        kinds: dict[str, torch.dtype] = {}
        for (name, at), having in self.where.items():
            rank, position = having[0]
            entry = self.headers[rank].table[position]
            kinds[name] = dtype_of(entry.dtype)
            chunk = ChunkStorageMetadata(offsets=torch.Size(at), sizes=torch.Size(entry.shape))
            chunks[name].append(chunk)
        return Metadata(
            {
                name: TensorStorageMetadata(
                    properties=TensorProperties(dtype=kinds.get(name, torch.float32)),
                    size=size,
                    chunks=chunks[name],
                )
                for name, size in self.shapes.items()
            }
        )

    def reset(self, checkpoint_id: Any = None) -> None: ...

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None: ...

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return False

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        rounds = list(self._rounds(plan.items))
        count = torch.tensor(len(rounds))
        dist.all_reduce(count, dist.ReduceOp.MAX)
        for number in range(int(count)):
            self._read(rounds[number] if number < len(rounds) else [], planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _rounds(self, items: Iterable[ReadItem]) -> Iterator[list[ReadItem]]:
        """All items, as many at once as `ROUND_BYTES` allows."""
        some: list[ReadItem] = []
        num_bytes = 0
        for item in items:
            size = math.prod(item.lengths) * self._dtype(item.storage_index).itemsize
            if some and num_bytes + size > ROUND_BYTES:
                yield some
                some, num_bytes = [], 0
            some.append(item)
            num_bytes += size
        if some:
            yield some

    def _read(self, items: Sequence[ReadItem], planner: LoadPlanner) -> None:
        """Ask for some items, answer what others ask for, and load what comes."""
        world = self.ranks.env.world_size
        wanted: list[list[ReadItem]] = [[] for _ in range(world)]
        asked: list[list[Part]] = [[] for _ in range(world)]
        for item in items:
            rank, position = self._chosen(item.storage_index)
            server = self.servers[rank]
            wanted[server].append(item)
            part = Part(rank, position, tuple(item.storage_offsets), tuple(item.lengths))
            asked[server].append(part)
        sent = [_bytes_of(msgspec.msgpack.encode(parts)) for parts in asked]
        requests = [PARTS.decode(one.numpy().tobytes()) for one in _exchange(sent)]
        answers = _exchange([self._contents(parts) for parts in requests])
        for mine, answer in zip(wanted, answers, strict=True):
            self._load(mine, answer, planner)

    def _chosen(self, index: MetadataIndex) -> tuple[int, int]:
        """The slot to read a shard from: one of this rank itself, or another one for each rank, so
        that replicas share the work."""
        assert index.offset is not None
        having = self.where[index.fqn, tuple(index.offset)]
        own = [one for one in having if one[0] in self.slots]
        return own[0] if own else having[self.ranks.env.rank % len(having)]

    def _dtype(self, index: MetadataIndex) -> torch.dtype:
        rank, position = self._chosen(index)
        return dtype_of(self.headers[rank].table[position].dtype)

    def _contents(self, parts: Sequence[Part]) -> torch.Tensor:
        found = []
        for part in parts:
            shard = self.slots[part.rank].view(self.headers[part.rank].table[part.entry])
            slices = tuple(
                slice(begin, begin + length)
                for begin, length in zip(part.at, part.shape, strict=True)
            )
            found.append(shard[slices].contiguous().view(-1).view(torch.uint8))
        return torch.cat(found) if found else torch.empty(0, dtype=torch.uint8)

    def _load(self, items: Sequence[ReadItem], answer: torch.Tensor, planner: LoadPlanner) -> None:
        begin = 0
        for item in items:
            dtype = self._dtype(item.storage_index)
            end = begin + math.prod(item.lengths) * dtype.itemsize
            # A copy, because a view of another type must begin at a multiple of its size.
            part = answer[begin:end].clone().view(dtype).view(tuple(item.lengths))
            target = planner.resolve_tensor(item).detach()
            target.copy_(part)
            planner.commit_tensor(item, target)
            begin = end


def _bytes_of(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _exchange(to_each: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Send bytes to each rank; returns what each one sent to this rank."""
    sizes = torch.tensor([one.numel() for one in to_each])
    coming = torch.empty_like(sizes)
    dist.all_to_all_single(coming, sizes)
    received = torch.empty(int(coming.sum()), dtype=torch.uint8)
    counts = coming.tolist()
    dist.all_to_all_single(received, torch.cat(list(to_each)), counts, sizes.tolist())
    return received.split(counts)
