"""How far an attempt got if its end was not seen: the last line of `metrics.jsonl`."""

import contextlib
import os
from pathlib import Path

from msgspec import Struct

from ndctl.rank.regular_file import open_regular
from orchestrator.contract.read_json import read_json

END_BYTES = 64 * 1024
"""Bytes at the end of the file that are read: hundreds of lines."""


class Reached(Struct, frozen=True, kw_only=True):
    attempt: int
    step: int
    at: float
    """Unix seconds at which the step was done."""


def last_reached(metrics: Path) -> Reached | None:
    """The newest step in the file, of any attempt; None if there is none. Lines that a crash cut
    short, or that cannot be read, are ignored."""
    try:
        with open_regular(metrics) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - END_BYTES))
            lines = file.read().split(b"\n")
    except OSError:
        return None
    for line in reversed(lines):
        with contextlib.suppress(ValueError, KeyError, TypeError, OverflowError):
            body = read_json(line)
            return Reached(
                attempt=int(body["attempt"]), step=int(body["step"]), at=float(body["time"])
            )
    return None
