"""One checkpoint of one rank in the memory of its host.

A slot is a file in memory (`slot_file.py`), which the agent owns, so it outlives the rank.
"""

import logging
import math
import mmap
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.tensor import DTensor

from orchestrator.contract.memory import slot_file
from orchestrator.contract.memory.peers import HostMemory

LOG = logging.getLogger("trainer")

PAGE = 4096
"""Each tensor begins at a multiple of this, so that a copy of it is fast."""
HEADER_ROOM = 1 << 20
"""Bytes kept for the header besides its table: the progress of the job, with its skipped data."""
ENTRY_ROOM = 256
"""Bytes kept in the header for one tensor besides its name."""


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor in a slot."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    """Of this rank's shard."""
    whole: tuple[int, ...]
    """Shape of the whole tensor."""
    at: tuple[int, ...]
    """Where the shard begins in the whole tensor."""
    offset: int

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * dtype_of(self.dtype).itemsize


class Header(slot_file.Sealed, frozen=True, kw_only=True):
    progress: str
    """JSON of the job's `Progress`."""
    history: str
    """Digest of what must not change if another mesh reads the slot."""
    table: tuple[Entry, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the tensors of this rank lie in each of its slots."""

    table: tuple[Entry, ...]
    num_bytes: int
    """Size of the slot."""


def layout_of(tensors: Mapping[str, torch.Tensor]) -> Layout:
    """`tensors` may be distributed; each rank keeps its own shards."""
    shards = {name: shard_of(tensor) for name, tensor in tensors.items()}
    items = create_default_local_save_plan(dict(tensors), is_coordinator=True).items
    data = {item.index.fqn: item.tensor_data for item in items}
    header = HEADER_ROOM + sum(ENTRY_ROOM + len(name.encode()) for name in shards)
    offset = _pages(slot_file.BEGIN.size + header)
    table = []
    for name, shard in shards.items():
        dtype = str(shard.dtype).removeprefix("torch.")
        whole = data[name]
        assert whole is not None  # it is a tensor
        entry = Entry(
            name=name,
            dtype=dtype,
            shape=tuple(shard.shape),
            whole=tuple(whole.size),
            at=tuple(whole.chunk.offsets),
            offset=offset,
        )
        table.append(entry)
        offset = _pages(offset + entry.num_bytes)
    return Layout(tuple(table), offset)


def _pages(num_bytes: int) -> int:
    return -(-num_bytes // PAGE) * PAGE


def shard_of(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of `tensor`, which shares its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def dtype_of(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype


class Slot:
    """One slot, which this process writes or reads. Nothing else uses it meanwhile."""

    def __init__(self, path: str) -> None:
        """Raises OSError, for example if the agent has ended."""
        self.path = path
        self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._map: mmap.mmap | None = None
        self._pinned = False

    def close(self) -> None:
        """Called last. The agent keeps the slot."""
        self._unmap()
        os.close(self._file)
        # Storage that hangs may delay a `complete` until now, and another file may have the number.
        self._file = -1

    @property
    def size(self) -> int:
        return os.fstat(self._file).st_size

    def header(self) -> Header | None:
        """None if the slot holds no complete checkpoint."""
        text = slot_file.header_of(self._file)
        try:
            return None if text is None else msgspec.json.decode(text, type=Header)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return None

    def reserve(self, layout: Layout, *, pinned: bool = False) -> None:
        """Make room for `layout`, and take the memory now.

        Args:
            pinned: a GPU copies to the slot at the speed of its bus.

        Raises:
            OSError: the memory cannot be had.
        """
        if self.size != layout.num_bytes:
            self._unmap()
            os.ftruncate(self._file, 0)  # what was there is of another layout
            os.posix_fallocate(self._file, 0, layout.num_bytes)
        self._bytes()  # mapped now, because this may be refused too
        if pinned and not self._pinned:
            self._pin()

    def _pin(self) -> None:
        cudart: Any = torch.cuda.cudart()
        error = int(cudart.cudaHostRegister(self._bytes().data_ptr(), self.size, 0))
        if error:
            LOG.warning("slow copies to memory: cudaHostRegister failed with error %d", error)
        self._pinned = not error

    def _unmap(self) -> None:
        if self._pinned:
            cudart: Any = torch.cuda.cudart()
            cudart.cudaHostUnregister(self._bytes().data_ptr())
        self._map, self._pinned = None, False

    def free(self) -> None:
        """Give the memory back; the slot is empty then."""
        self._unmap()
        os.ftruncate(self._file, 0)

    def clear(self) -> None:
        """The slot holds no complete checkpoint from now on. Its memory is kept."""
        slot_file.clear(self._file)

    def zero_gaps(self, layout: Layout) -> None:
        """What is between the tensors may be of another layout of the same size."""
        for entry in layout.table:
            end = entry.offset + entry.num_bytes
            self._bytes()[end : _pages(end)].zero_()

    def write(self, layout: Layout, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy `tensors` into the slot, or have the current stream of a GPU do that; it is not
        complete before `complete`."""
        self.clear()
        for entry in layout.table:
            self.view(entry).copy_(shard_of(tensors[entry.name]), non_blocking=True)

    def complete(self, header: Header) -> None:
        """Declare the slot complete.

        Raises:
            ValueError: the header is longer than the room for it.
        """
        text = msgspec.json.encode(header)
        if slot_file.BEGIN.size + len(text) > header.table[0].offset:
            raise ValueError(f"the header has {len(text)} bytes, more than its room")
        os.pwrite(self._file, text, slot_file.BEGIN.size)
        slot_file.complete(self._file, len(text))

    @property
    def mark(self) -> int:
        """What became of its copies on partner hosts (`slot_file.py`)."""
        return slot_file.mark_of(self._file)

    def read(self, table: Sequence[Entry], tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy the slot's tensors into those of the same name."""
        for entry in table:
            shard_of(tensors[entry.name]).copy_(self.view(entry))

    def state(
        self, table: Sequence[Entry], like: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """The slot's tensors, which share its memory, distributed as those in `like`."""
        return {entry.name: placed(self.view(entry), like[entry.name]) for entry in table}

    def digest(self, table: Sequence[Entry]) -> int:
        """As in `Sealed`, over the bytes of all tensors."""
        words = self._bytes()[table[0].offset :].view(torch.int64)
        # int64 wraps around, so the order in which threads add does not matter.
        return int(words.sum())

    def is_sound(self, header: Header) -> bool:
        """The tensors are as they were when the slot was made."""
        end = max(entry.offset + entry.num_bytes for entry in header.table)
        return self.size >= end and self.digest(header.table) == header.digest

    def view(self, entry: Entry) -> torch.Tensor:
        """The tensor in the slot itself."""
        end = entry.offset + entry.num_bytes
        return self._bytes()[entry.offset : end].view(dtype_of(entry.dtype)).view(entry.shape)

    def _bytes(self) -> torch.Tensor:
        if self._map is None:
            self._map = mmap.mmap(self._file, self.size)
        return torch.frombuffer(self._map, dtype=torch.uint8)


def placed(shard: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """`shard`, which stays on the host, as this rank's part of a tensor that is distributed as
    `like`."""
    if not isinstance(like, DTensor):
        return shard
    # `DTensor.from_local` would copy it to the device of the mesh.
    return DTensor(shard, like._spec, requires_grad=False)


def slots_of(memory: HostMemory, local_rank: int) -> tuple[Slot, ...]:
    """The slots of a rank. Raises OSError."""
    return tuple(Slot(path) for path in memory.slots[local_rank])
