"""Flight-recorder dumps of a host's ranks: asked for, awaited for so long, read and reduced here,
so that what goes to the leader is small however many ranks there are.
"""

import asyncio
import contextlib
import os
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from orchestrator.agent.evidence import process_state, send_signal
from orchestrator.contract.env import DUMP_SIGNAL, nccl_pipe
from orchestrator.contract.rundir import FLIGHT_FILES, LAST_FILES
from orchestrator.diagnosis.digest import to_text
from orchestrator.diagnosis.dumps import HISTORY, RankDump
from orchestrator.diagnosis.folder import read_dump

POLL_S = 0.1
MOST_BYTES = 32 << 20
"""Of one dump that is kept; 2,000 operations without their stacks are a fiftieth of it."""
FEW = 512
"""Ranks of a job up to which a reduced dump keeps much of what was called before."""
LITTLE_HISTORY = 4
SILENT = {
    "T": "the process is stopped (state T)",
    "t": "the process is stopped by a debugger (state t)",
    "D": "the process waits in the kernel (state D)",
    "Z": "the process is dead",
    "gone": "the process is gone",
}
"""By the state that a process had when it was asked: why it does not answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asking:
    """Where dumps come to, and how ranks are asked for them."""

    traces: Path
    socket: Path
    attempt: int
    world: int
    """Ranks of the whole job."""
    files: str = FLIGHT_FILES
    """How their names begin."""


@dataclass(slots=True)
class Dumps:
    reduced: dict[int, str] = field(default_factory=dict)
    """Rank -> its dump, as `digest` writes it."""
    missing: dict[int, str] = field(default_factory=dict)
    """Rank -> why there is none."""
    withheld: tuple[int, ...] = ()
    """Ranks that ran, and gave none in time."""


async def gather_dumps(
    pids: Mapping[int, int], ended: Mapping[int, str], asking: Asking, timeout_s: float
) -> Dumps:
    """Of the ranks that run (rank -> process) and of those that have `ended` (rank -> how).

    Who has ended may have written one: NCCL's watchdog does on its timeout. A rank that does not
    answer is not waited for beyond `timeout_s`; nor is one that is stopped or gone.
    """
    before = await asyncio.to_thread(_stamps, asking, list(pids))
    states = {rank: process_state(pid) for rank, pid in pids.items()}
    awaited = {rank for rank, state in states.items() if state not in SILENT}
    for rank, pid in pids.items():
        if states[rank] not in ("gone", "Z"):
            send_signal(pid, DUMP_SIGNAL)
            await asyncio.to_thread(_ask_monitor, asking, rank)
    waited, sizes = 0.0, dict(before)
    while awaited and waited < timeout_s:
        await asyncio.sleep(POLL_S)
        waited += POLL_S
        now = await asyncio.to_thread(_stamps, asking, sorted(awaited))
        # NCCL's monitor writes in place: what still grows is not read yet.
        awaited -= {rank for rank in awaited if now[rank] not in (None, before[rank])} & {
            rank for rank in awaited if now[rank] == sizes[rank]
        }
        sizes |= now
    why = {rank: SILENT.get(state, _mute(timeout_s)) for rank, state in states.items()}
    why |= {rank: f"it had ended ({how}) and wrote none" for rank, how in ended.items()}
    found = await asyncio.to_thread(_read_all, asking, why)
    found.withheld = tuple(sorted(awaited & set(found.missing)))
    return found


async def last_dumps(ended: Mapping[int, str], asking: Asking) -> Dumps:
    """What ranks that have ended (rank -> how) wrote themselves on their way out."""
    why = {rank: f"it ended ({how}) and wrote none" for rank, how in ended.items()}
    return await asyncio.to_thread(_read_all, replace(asking, files=LAST_FILES), why)


def _mute(timeout_s: float) -> str:
    return f"no answer within {timeout_s:.0f} s: its GIL is held, or its disk does not take it"


def _path(asking: Asking, rank: int) -> Path:
    return asking.traces / f"{asking.files}{rank}"


def _stamps(asking: Asking, ranks: Iterable[int]) -> dict[int, tuple[int, int] | None]:
    """In a thread: storage that does not answer may be why the ranks hang, and the agent is to be
    heard meanwhile."""
    return {rank: _stamp(asking, rank) for rank in ranks}


def _stamp(asking: Asking, rank: int) -> tuple[int, int] | None:
    try:
        found = _path(asking, rank).stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size


def _ask_monitor(asking: Asking, rank: int) -> None:
    """NCCL's monitor reads a pipe once a second; with no reader (gloo alone) there is none."""
    pipe = nccl_pipe(str(asking.socket), asking.attempt, rank)
    with contextlib.suppress(OSError):
        if stat.S_ISFIFO(pipe.stat().st_mode):
            out = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
            with contextlib.closing(os.fdopen(out, "wb", buffering=0)) as file:
                file.write(b"1\n")


def _read_all(asking: Asking, why: Mapping[int, str]) -> Dumps:
    found = Dumps()
    history = HISTORY if asking.world <= FEW else LITTLE_HISTORY
    for rank, reason in sorted(why.items()):
        path = _path(asking, rank)
        stamp = _stamp(asking, rank)
        if stamp is None:
            found.missing[rank] = reason
            continue
        if stamp[1] > MOST_BYTES:
            found.missing[rank] = f"larger than {MOST_BYTES >> 20} MiB, so it was not kept"
            path.unlink(missing_ok=True)
            continue
        dump = read_dump(rank, path, history)
        if isinstance(dump, RankDump):
            found.reduced[rank] = to_text(dump)
        else:
            found.missing[rank] = f"cannot be read: {dump[1]}"
    return found
