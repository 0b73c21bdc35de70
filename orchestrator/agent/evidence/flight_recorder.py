"""Requests the flight recorder dumps of a host's ranks, waits for them, and summarizes them.

The summary is made here, so that little goes to the leader even if there are many ranks.
"""

import asyncio
import contextlib
import os
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from orchestrator.agent.evidence.rank_evidence import (
    READ_S,
    SILENT,
    mute,
    process_state,
    send_signal,
)
from orchestrator.contract.files.env import DUMP_SIGNAL, nccl_pipe
from orchestrator.contract.files.run_dir import FLIGHT_FILES, LAST_FILES
from orchestrator.diagnosis.dumps.dump import HISTORY
from orchestrator.diagnosis.dumps.dump_summary import to_text
from orchestrator.diagnosis.dumps.reader import Refused
from orchestrator.diagnosis.dumps.reader_client import read_dumps
from orchestrator.posix.run_with_timeout import Limit

POLL_S = 0.1
MOST_BYTES = 32 << 20
"""Largest dump that is kept; 2,000 operations without stacks take a fiftieth of it."""
FEW = 512
"""Ranks of a job up to which a summary keeps a long history of finished operations."""
LITTLE_HISTORY = 4
Stamps = dict[int, tuple[int, int] | None]
"""Rank -> time of the last write to its dump in ns, and its size in bytes; None: no dump."""


class Asking(Struct, frozen=True, kw_only=True):
    """Where ranks write their dumps, and how to ask for them."""

    traces: Path
    socket: Path
    attempt: int
    world: int
    """Ranks of the whole job."""
    files: str = FLIGHT_FILES
    """Prefix of the dumps' file names."""


@dataclass(slots=True)
class Dumps:
    reduced: dict[int, str] = field(default_factory=dict)
    """Rank -> summary of its dump (`diagnosis/dumps/dump_summary.py`)."""
    missing: dict[int, str] = field(default_factory=dict)
    """Rank -> why there is no dump."""
    withheld: tuple[int, ...] = ()
    """Ranks that were running but wrote no dump in time."""


async def gather_dumps(
    pids: Mapping[int, int], ended: Mapping[int, str], asking: Asking, timeout_s: float
) -> Dumps:
    """Dumps of the running ranks and of those that have ended.

    A rank that has ended may have written a dump: NCCL's watchdog does that on a timeout. Ranks
    that are stopped or gone cannot answer, so this function does not wait for them.

    Args:
        pids: rank -> process id of the ranks that run.
        ended: rank -> how it ended.
    """
    limit, reading = Limit(timeout_s), Limit(timeout_s + READ_S)
    states = {rank: process_state(pid) for rank, pid in pids.items()}
    why = {rank: SILENT.get(state, _mute(timeout_s)) for rank, state in states.items()}
    why |= {rank: f"it had ended ({how}) without a dump" for rank, how in ended.items()}
    try:
        # A dump may be there already, for example of an earlier hang of this attempt. Only a newer
        # one is an answer.
        before = await limit.within(_stamps, asking, list(pids))
    except TimeoutError:
        return Dumps(missing=dict.fromkeys(why, mute(asking.traces)))
    # A stopped rank or one in state D is asked too. It may continue before the time is over.
    asked = [rank for rank, state in states.items() if state not in ("gone", "Z")]
    for rank in asked:
        send_signal(pids[rank], DUMP_SIGNAL)
    with contextlib.suppress(TimeoutError):
        await limit.within(_ask_monitors, asking, asked)
    awaited = {rank for rank, state in states.items() if state not in SILENT}
    try:
        await _answers(asking, awaited, before, limit, reading)
    except TimeoutError:  # storage failed, so nothing is known about the ranks
        why |= dict.fromkeys(awaited, mute(asking.traces))
        awaited = set()
    found = await _read_all(asking, why, reading)
    found.withheld = tuple(sorted(awaited & set(found.missing)))
    return found


async def last_dumps(ended: Mapping[int, str], asking: Asking, timeout_s: float) -> Dumps:
    """Dumps that ranks wrote before they exited.

    Args:
        ended: rank -> how it ended.
    """
    why = {rank: f"it ended ({how}) without a dump" for rank, how in ended.items()}
    return await _read_all(replace(asking, files=LAST_FILES), why, Limit(timeout_s))


async def _answers(
    asking: Asking, awaited: set[int], before: Stamps, limit: Limit, reading: Limit
) -> None:
    """Wait for new dumps, and remove their ranks from `awaited`. Raises TimeoutError if storage
    times out."""
    sizes = dict(before)
    while awaited and limit.left_s:
        await asyncio.sleep(min(POLL_S, limit.left_s))
        now = await reading.within(_stamps, asking, sorted(awaited))
        # NCCL's monitor writes in place, so a dump is complete only when it has stopped growing.
        awaited -= {
            rank
            for rank in awaited
            if now[rank] not in (None, before[rank]) and now[rank] == sizes[rank]
        }
        sizes |= now


def _mute(timeout_s: float) -> str:
    return f"no answer within {timeout_s:.0f} s: its GIL is held, or its disk is blocked"


def _path(asking: Asking, rank: int) -> Path:
    return asking.traces / f"{asking.files}{rank}"


def _stamps(asking: Asking, ranks: Iterable[int]) -> Stamps:
    return {rank: _stamp(asking, rank) for rank in ranks}


def _stamp(asking: Asking, rank: int) -> tuple[int, int] | None:
    try:
        found = _path(asking, rank).stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size


def _ask_monitors(asking: Asking, ranks: Iterable[int]) -> None:
    for rank in ranks:
        _ask_monitor(asking, rank)


def _ask_monitor(asking: Asking, rank: int) -> None:
    """Ask NCCL's monitor thread for a dump. It reads the pipe once a second. A job with gloo alone
    has no pipe."""
    pipe = nccl_pipe(str(asking.socket), asking.attempt, rank)
    with contextlib.suppress(OSError):
        if stat.S_ISFIFO(pipe.stat().st_mode):
            # Without O_NONBLOCK this would block until the monitor thread reads, which may never
            # happen.
            out = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
            with contextlib.closing(os.fdopen(out, "wb", buffering=0)) as file:
                file.write(b"1\n")


async def _read_all(asking: Asking, why: Mapping[int, str], limit: Limit) -> Dumps:
    """Read all dumps at the same time, so that an unreadable one does not delay the others."""
    found = Dumps()

    async def read(rank: int, reason: str) -> None:
        try:
            text, problem = await limit.within(_read, asking, rank, reason)
        except TimeoutError:
            text, problem = "", mute(asking.traces)
        except OSError as exc:
            text, problem = "", f"cannot be read: {exc}"
        if text:
            found.reduced[rank] = text
        else:
            found.missing[rank] = problem

    await asyncio.gather(*(read(rank, reason) for rank, reason in sorted(why.items())))
    return found


def _read(asking: Asking, rank: int, reason: str) -> tuple[str, str]:
    """The summary of a dump, or the reason why there is none. Raises OSError.

    Args:
        reason: the reason if the rank wrote no dump.
    """
    path, stamp = _path(asking, rank), _stamp(asking, rank)
    if stamp is None:
        return "", reason
    if stamp[1] > MOST_BYTES:
        path.unlink(missing_ok=True)
        return "", f"deleted, because it was larger than {MOST_BYTES >> 20} MiB"
    history = HISTORY if asking.world <= FEW else LITTLE_HISTORY
    (found,) = read_dumps([(rank, path)], history)
    if isinstance(found, Refused):
        return "", f"cannot be read: {found.why}"
    return to_text(found.dump), ""
