"""Removes expired and useless lines from a large file of strikes.

Leaders append to the file for years. A leader whose strike makes it large replaces it by a shorter
one, under a lock that appending processes share. The replacement is atomic, so a kill at any moment
leaves a complete file.
"""

import fcntl
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from orchestrator.contract.files.atomic_write import written_beside
from orchestrator.contract.files.shared_lines import is_there, share
from orchestrator.contract.read_json import read_json
from orchestrator.host_strikes import (
    HALF_LIFE_S,
    STRAGGLER,
    Cleared,
    Line,
    Pinned,
    Record,
    Strike,
    Unpinned,
    Withdrawn,
    fold,
    lines_in,
)

LARGE_BYTES = 256 << 10
"""Size of some hundred strikes with their evidence."""
KEPT_S = 14 * HALF_LIFE_S
"""An older strike counts less than a ten-thousandth."""
NEAR_S = 300.0
"""Exclusions that end within this of each other count as equal."""


def shed(path: Path, now: float, large_bytes: int = LARGE_BYTES) -> bool:
    """Shorten the file if it is large and at least half of its lines are useless. Returns whether
    it did.

    Raises OSError and leaves the file as it was, for example while another process appends, or if
    the file belongs to another user. The next strike tries again.
    """
    if path.stat().st_size < large_bytes:
        return False
    with path.open("rb+") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not is_there(file.fileno(), path):
            return False  # another leader has replaced it
        texts = file.read().split(b"\n")
        keep = list(needed(texts, now))
        if 2 * len(keep) > len(texts):
            return False  # not worth it
        _replace(path, b"".join(text + b"\n" for text in keep))
    return True


def _replace(path: Path, data: bytes) -> None:
    with written_beside(path, data, durable=True) as fresh:
        share(fresh, path.parent.parent, 0o666)
        fresh.replace(path)


def needed(texts: Sequence[bytes], now: float) -> Iterator[bytes]:
    """The lines of a file that still matter, in their order. Pure.

    For each host these are the strikes that still count, all strikes that exclude it, one strike
    that says that it was slow before, and its pin. Recent commands of a person and withdrawals stay
    too, so that a late strike of a leader cannot undo them.
    """
    parsed = [(text, lines_in(text)) for text in texts]
    lines = tuple(line for _, found in parsed for line in found)
    keep = set(_needed(lines, now))
    written: set[Line] = set()
    for text, found in parsed:
        if not found:
            # Valid JSON of an unknown kind comes from another version of ndctl, so it stays. Other
            # text is a line that a crash cut short.
            if _is_object(text):
                yield text
        elif any(line in keep and line not in written for line in found):
            written.update(found)
            yield text


def _needed(lines: Iterable[Line], now: float) -> Iterator[Line]:
    lines = tuple(lines)
    for record in fold(lines, now):
        young = [strike for strike in record.strikes if now - strike.at < KEPT_S]
        kept = young if _as_long(record, young, now) else record.strikes
        yield from kept
        # After it, the first of those that are kept has full weight.
        slow = (one for one in record.strikes if one.kind == STRAGGLER and one not in kept)
        yield from list(slow)[-1:]
        if record.pin is not None:
            yield record.pin
    for line in lines:
        if isinstance(line, Withdrawn | Cleared | Pinned | Unpinned) and now - line.at < KEPT_S:
            yield line


def _as_long(record: Record, young: Iterable[Strike], now: float) -> bool:
    """Whether the young strikes alone exclude the host for as long, within a few minutes."""
    if record.excluded_until is None:
        return True
    until = [alone.excluded_until for alone in fold(young, now)]
    return any(at is not None and record.excluded_until - at < NEAR_S for at in until)


def _is_object(text: bytes) -> bool:
    try:
        return isinstance(read_json(text), dict)
    except ValueError:
        return False
