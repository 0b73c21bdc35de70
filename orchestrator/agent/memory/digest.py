"""Checks a slot that was fetched from another host against the digest that its rank computed."""

import os

import msgspec

from orchestrator.contract.memory.slot_file import BEGIN, Sealed

LOOK_BYTES = 8 << 20
MODULUS, SIGN = 1 << 64, 1 << 63


def is_sound(file: int, header_bytes: int) -> bool:
    """Whether a slot that is received, and not yet complete, is what its rank wrote."""
    try:
        header = msgspec.json.decode(os.pread(file, header_bytes, BEGIN.size), type=Sealed)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return False
    return digest_of(file, header.digest_at) == header.digest


def digest_of(file: int, begin: int) -> int | None:
    """As in `Sealed`; None if the size is no multiple of 8, or the slot ends before `begin`."""
    # Imported late, because an agent needs it only when it fetches a slot.
    import numpy as np

    end, total = os.fstat(file).st_size, 0
    if begin < 0 or begin > end or (end - begin) % 8:
        return None
    buffer = bytearray(min(LOOK_BYTES, end - begin))
    for at in range(begin, end, LOOK_BYTES):
        view = memoryview(buffer)[: min(LOOK_BYTES, end - at)]
        # Not mapped: if a rank made the file shorter, touching a map would kill this process.
        if os.preadv(file, [view], at) != len(view):
            return None
        total += int(np.frombuffer(view, np.int64).sum(dtype=np.int64))
    return (total + SIGN) % MODULUS - SIGN
