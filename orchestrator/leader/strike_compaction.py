"""A file of strikes sheds what has faded and what nobody needs, once it has grown.

Leaders append to it, for years. The one whose strike finds it large puts a shorter one in its
place, under the lock that who appends shares: whole or not at all, so whenever it is killed there
is one with all that counts.
"""

import fcntl
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from orchestrator.contract.files.atomic_write import written_beside
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
    fold,
    is_there,
    lines_in,
    share,
)

LARGE_BYTES = 256 << 10
"""Some hundred strikes with their evidence."""
KEPT_S = 14 * HALF_LIFE_S
"""A strike that is older counts less than a ten-thousandth."""
NEAR_S = 300.0


def shed(path: Path, now: float, large_bytes: int = LARGE_BYTES) -> bool:
    """Whether the file was large, and shorter without what nobody needs, and is now.

    Raises OSError, with the file as it was: where someone appends at this moment, for example, or
    another user's file may not be replaced. The next strike tries again.
    """
    if path.stat().st_size < large_bytes:
        return False
    with path.open("rb+") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not is_there(file.fileno(), path):
            return False  # another has done it
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
    """The lines of a file that still say something, in their order.

    Of each host the strikes that count, and all of those for which it is left out; one that tells
    that it has been slow before; its pin; and what a person said lately, which late news of a
    leader must not undo. What another ndctl wrote is not ours to judge. Pure.
    """
    said = [(text, lines_in(text)) for text in texts]
    lines = tuple(line for _, found in said for line in found)
    keep = set(_needed(lines, now))
    written: set[Line] = set()
    for text, found in said:
        if not found:
            if _is_object(text):
                yield text
        elif any(line in keep and line not in written for line in found):
            written.update(found)
            yield text


def _needed(lines: Iterable[Line], now: float) -> Iterator[Line]:
    lines = tuple(lines)
    for record in fold(lines, now):
        young = [strike for strike in record.strikes if now - strike.at < KEPT_S]
        yield from young if _as_long(record, young, now) else record.strikes
        slow = [strike for strike in record.strikes if strike.kind == STRAGGLER]
        yield from slow[-1:]
        if record.pin is not None:
            yield record.pin
    for line in lines:
        if isinstance(line, Cleared | Pinned | Unpinned) and now - line.at < KEPT_S:
            yield line


def _as_long(record: Record, young: Iterable[Strike], now: float) -> bool:
    """Whether the young strikes alone leave the host out for as long, by minutes."""
    if record.excluded_until is None:
        return True
    until = [alone.excluded_until for alone in fold(young, now)]
    return any(at is not None and record.excluded_until - at < NEAR_S for at in until)


def _is_object(text: bytes) -> bool:
    """Or else a torn line."""
    try:
        return isinstance(read_json(text), dict)
    except ValueError:
        return False
