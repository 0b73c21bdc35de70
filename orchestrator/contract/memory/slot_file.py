"""The file of one checkpoint in memory: what its rank writes and agents read.

It begins with length and checksum of its header and a mark, then come the header (JSON) and the
tensors. The length is 0 while the slot is being written, and is set last. So a process that ends at
any moment leaves either a complete slot or an empty one.

The header has a digest that the rank computes once, and each use of the slot has one check:
- A slot that changes while it is sent is found by the sender, which looks at the label again.
- Bytes that change on the way break the connection: TLS authenticates each record.
- A copy that changed on its host since is found by the agent that fetches it, which knows whose it
  is and asks another host, and by the rank that loads it. Neither is while ranks train.
"""

import os
import struct
import zlib
from collections.abc import Sequence

import msgspec
from msgspec import Struct

from orchestrator.contract.files.checkpoint_names import Made

BEGIN = struct.Struct("<IIQ")
"""Length of the header, its CRC-32, and the mark. The header has the position in the data, so a bit
that flips in it must not go unnoticed either."""
MARK = struct.Struct("<Q")
MARK_AT = BEGIN.size - MARK.size
SENDING, SENT, NOT_SENT = 0, 1, 2
"""Marks: what became of the copies on partner hosts. The rank sets the first, its agent the others.
"""


class Label(Struct, frozen=True, kw_only=True):
    """The part of a slot's header that says whose checkpoint it is."""

    lineage: int
    """The attempt in which training last started from the disk or at step 0."""
    made: Made
    rank: int
    ranks: int
    """Number of ranks of its attempt. With the slots of all of them the checkpoint is complete."""
    config: str
    """Digest of the trainer's configuration. With another one the shards may be others."""
    shared: Made | None = None
    """The newest checkpoint of which all ranks had copies on partner hosts when this one was made.
    """


class Sealed(Label, frozen=True, kw_only=True):
    """The part of a header with which anybody can check the slot."""

    digest: int
    """Of the bytes from `digest_at` to the end of the slot: the sum of their 64-bit words (of this
    machine's byte order), without what exceeds 64 bits, as a signed number. A flipped bit changes
    it, and so does a page that was not copied. Memory is read faster than it is summed up."""
    digest_at: int
    """A multiple of 8, as the size of the slot is."""


def header_of(file: int) -> bytes | None:
    """None if the slot holds no complete checkpoint."""
    begin = os.pread(file, BEGIN.size, 0)
    length, checksum, _ = BEGIN.unpack(begin) if len(begin) == BEGIN.size else (0, 0, 0)
    if not 0 < length <= os.fstat(file).st_size:
        return None
    text = os.pread(file, length, BEGIN.size)
    return text if zlib.crc32(text) == checksum else None


def label_of(file: int) -> Label | None:
    """None if the slot holds no complete checkpoint."""
    text = header_of(file)
    try:
        return None if text is None else msgspec.json.decode(text, type=Label)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


def clear(file: int) -> None:
    """The slot holds no complete checkpoint from now on. Its memory is kept."""
    if os.fstat(file).st_size:
        os.pwrite(file, BEGIN.pack(0, 0, SENDING), 0)


def complete(file: int, header_bytes: int) -> None:
    """Declare the slot complete: its header and tensors are written."""
    # Last, and in one write. The kernel orders it after what this process wrote before.
    checksum = zlib.crc32(os.pread(file, header_bytes, BEGIN.size))
    os.pwrite(file, BEGIN.pack(header_bytes, checksum, SENDING), 0)


def set_mark(file: int, mark: int) -> None:
    os.pwrite(file, MARK.pack(mark), MARK_AT)


def mark_of(file: int) -> int:
    mark: int = MARK.unpack(os.pread(file, MARK.size, MARK_AT))[0]
    return mark


def is_history(made: Made, resumed: Sequence[Made]) -> bool:
    """Whether training still builds on this checkpoint.

    Args:
        resumed: from where each attempt since the lineage began resumed: its number, and the step.
    """
    return all(made.step <= one.step for one in resumed if one.attempt > made.attempt)
