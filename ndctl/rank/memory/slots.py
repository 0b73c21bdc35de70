"""Checkpoints of a script in the memory of its host: the files, which belong to the agent.

A slot begins as `contract/memory/slot_file.py` says: length and checksum of its header and a mark,
then the header (JSON). Then come the bytes of the state. The agent copies slots to partner hosts,
and knows nothing of a state.
"""

import contextlib
import io
import json
import os
import struct
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ndctl.rank.memory.available import host_room

BEGIN = struct.Struct("<IIQ")
MARK = struct.Struct("<Q")
MARK_AT = BEGIN.size - MARK.size
SENDING, SENT, NOT_SENT = 0, 1, 2
ROOM = 1 << 16
"""Bytes before the state."""
FORMAT = "script-2"
"""In the place of a digest of the configuration, which ndctl does not know."""
LOOK_EACH = 64 << 20
"""Bytes that are written between two looks at how much memory is left."""
CHUNK = 8 << 20
WORD = 8
"""Bytes of a word of the digest."""
MODULUS, SIGN = 1 << 64, 1 << 63

Made = tuple[int, int]
"""Step, and the attempt that made it."""


class NoRoom(OSError):
    """The host has too little memory left."""


class Memory(NamedTuple):
    """What the agent says about this rank's memory."""

    lineage: int
    slots: Sequence[str]
    resumed: Sequence[Made]
    restored: Made | None
    copies: int
    why: str = ""
    """Why there are no slots."""

    @staticmethod
    def of(text: str, local_rank: int) -> "Memory":
        """`text`: the variable NDCTL_MEMORY."""
        body: dict[str, Any] = json.loads(text)
        return Memory(
            lineage=body["lineage"],
            slots=body["slots"][local_rank] if body["slots"] else (),
            resumed=[_made(one) for one in body.get("resumed", ())],
            restored=_made(body["restored"]) if body.get("restored") else None,
            copies=body.get("copies", 0),
            why=body.get("why", ""),
        )


def _made(body: Mapping[str, int]) -> Made:
    return body["step"], body["attempt"]


class Header(NamedTuple):
    """Of a complete slot."""

    made: Made
    lineage: int
    rank: int
    ranks: int
    num_bytes: int
    digest: int
    """As in `contract/memory/slot_file.py`: agents check what they fetch with it."""
    pickled: bool
    """With pickle, because the script had not imported torch."""
    shared: Made | None
    """The newest checkpoint of which all ranks had copies on partner hosts."""

    def to_json(self) -> bytes:
        step, attempt = self.made
        shared = self.shared and {"step": self.shared[0], "attempt": self.shared[1]}
        body = {
            **self._asdict(),
            "config": FORMAT,
            "digest_at": ROOM,
            "made": {"step": step, "attempt": attempt},
            "shared": shared,
        }
        return json.dumps(body).encode()

    @staticmethod
    def of(text: bytes) -> "Header | None":
        """None if a script of this version did not write it."""
        try:
            body: dict[str, Any] = json.loads(text)
            if (body.pop("config"), body.pop("digest_at")) != (FORMAT, ROOM):
                return None
            made, shared = _made(body.pop("made")), body.pop("shared")
            return Header(made=made, shared=_made(shared) if shared else None, **body)
        except (ValueError, KeyError, TypeError):
            return None


class Slot:
    def __init__(self, path: str) -> None:
        """Raises OSError, for example if the agent has ended."""
        self.file = os.open(path, os.O_RDWR | os.O_CLOEXEC)

    def header(self) -> Header | None:
        """None if the slot holds no complete checkpoint of a script."""
        begin = os.pread(self.file, BEGIN.size, 0)
        length, checksum, _ = BEGIN.unpack(begin) if len(begin) == BEGIN.size else (0, 0, 0)
        if not 0 < length <= ROOM - BEGIN.size:
            return None
        text = os.pread(self.file, length, BEGIN.size)
        return Header.of(text) if zlib.crc32(text) == checksum else None

    @property
    def mark(self) -> int:
        """What became of its copies on partner hosts."""
        text = os.pread(self.file, MARK.size, MARK_AT)
        return MARK.unpack(text)[0] if len(text) == MARK.size else NOT_SENT

    def write(self, dump: Callable[[Any], None]) -> tuple[int, int]:
        """Have `dump` write the state. The slot is not complete before `complete`.

        Returns:
            Bytes, and the digest.

        Raises:
            NoRoom: the memory of the host is used up. The slot has given its own back.
        """
        os.pwrite(self.file, BEGIN.pack(0, 0, SENDING), 0)
        writer = Writer(self.file)
        try:
            dump(writer)
        except BaseException:
            os.ftruncate(self.file, 0)
            raise
        os.ftruncate(self.file, _size(writer.written))
        return writer.written, self._digest()

    def complete(self, header: Header) -> None:
        text = header.to_json()
        os.pwrite(self.file, text, BEGIN.size)
        # Last, and in one write.
        os.pwrite(self.file, BEGIN.pack(len(text), zlib.crc32(text), SENDING), 0)

    def is_sound(self, header: Header) -> bool:
        """The bytes are those that the rank wrote."""
        whole = os.fstat(self.file).st_size == _size(header.num_bytes)
        return whole and self._digest() == header.digest

    def _digest(self) -> int:
        end, total = os.fstat(self.file).st_size, 0
        buffer = bytearray(min(CHUNK, end - ROOM))
        for at in range(ROOM, end, CHUNK):
            view = memoryview(buffer)[: min(CHUNK, end - at)]
            os.preadv(self.file, [view], at)
            total += _sum(view)
        return (total + SIGN) % MODULUS - SIGN

    def read(self, header: Header) -> io.BufferedReader:
        """The state, as a file to read."""
        return io.BufferedReader(Reader(self.file, header.num_bytes))

    def free(self) -> None:
        with contextlib.suppress(OSError):
            os.ftruncate(self.file, 0)


def _size(num_bytes: int) -> int:
    """Of a slot with a state of `num_bytes`: whole words."""
    return ROOM + -(-num_bytes // WORD) * WORD


def _sum(view: memoryview) -> int:
    """Of the words, maybe without what exceeds 64 bits."""
    # Any script with torch has it. A script without it has little state.
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return sum(view.cast("q"))
    return int(numpy.frombuffer(view, numpy.int64).sum(dtype=numpy.int64))


class Writer(io.RawIOBase):
    """A file in which a state is written from its beginning to its end."""

    def __init__(self, file: int) -> None:
        self.file, self.written = file, 0
        self.size = os.fstat(file).st_size - ROOM
        self.look_at = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        for begin in range(0, len(view), CHUNK):
            self._write(view[begin : begin + CHUNK])
        return len(view)

    def _write(self, view: memoryview) -> None:
        end = self.written + len(view)
        # Without this the kernel would kill a process when the memory is used up. What the slot
        # has already is no new memory.
        if end > max(self.size, self.look_at):
            if host_room().available < LOOK_EACH + len(view):
                raise NoRoom(f"the host has less than {LOOK_EACH >> 20} MiB left")
            self.look_at = end + LOOK_EACH
        left = view
        while left:
            wrote = os.pwrite(self.file, left, ROOM + self.written)
            self.written, left = self.written + wrote, left[wrote:]


class Reader(io.RawIOBase):
    def __init__(self, file: int, size: int) -> None:
        self.file, self.size, self.at = file, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self.at, os.SEEK_END: self.size}[whence]
        self.at = max(0, base + offset)
        return self.at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        room = max(0, min(len(view), self.size - self.at))
        count = os.preadv(self.file, [view[:room]], ROOM + self.at) if room else 0
        self.at += count
        return count
