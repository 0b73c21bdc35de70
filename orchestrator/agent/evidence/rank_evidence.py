"""What an agent observes of its ranks from outside: process state, stacks, last log lines."""

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from orchestrator.contract.files.env import STACKS_SIGNAL
from orchestrator.diagnosis.cause.exits import signal_name
from orchestrator.diagnosis.logs.last_words import without_frames
from orchestrator.diagnosis.logs.patterns import MOST_BYTES, MOST_LINES, Text, bounded
from orchestrator.diagnosis.stacks.kernel_stacks import place_of_process
from orchestrator.diagnosis.stacks.python_stacks import of_the_program, shortened
from orchestrator.posix.run_with_timeout import Limit

LOG_LINES = 20
STACK_LINES = 60
STACK_POLL_S = 0.1
PATIENT = 0.6
"""Part of the time after which ranks that have not answered are urged."""
READ_S = 3.0
"""Extra time to read the answers that came in time."""
SILENT = {
    "T": "the process is stopped (state T)",
    "t": "the process is stopped by a debugger (state t)",
    "D": "the process waits in the kernel (state D)",
    "Z": "the process is dead",
    "gone": "the process is gone",
}
"""State of a process that cannot answer -> the reason to report."""


def process_state(pid: int) -> str:
    """Linux's letter for the state of `pid` (R, S, D, T, Z, ...), or `gone`."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "gone"
    # The name of the program is in parentheses, and may have parentheses and spaces itself.
    return stat[stat.rindex(")") + 2]


def parent_of(pid: int) -> int | None:
    """None if `pid` has ended and was reaped."""
    stat = _read(Path(f"/proc/{pid}/stat"))
    return int(stat[stat.rindex(")") + 2 :].split()[1]) if stat else None


def place_in_kernel(pid: int) -> str:
    """Where a process in state D waits; empty if this user may read neither of the two files.

    Only root may read `stack`. Reading them does not block, unlike reading `cmdline`.
    """
    stack, wchan = (_read(Path(f"/proc/{pid}/{name}")) for name in ("stack", "wchan"))
    return place_of_process(stack, wchan)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def waited_for_cpu(pid: int) -> float:
    """Seconds for which the main thread of `pid` was ready to run but had no processor; 0 if the
    kernel does not count them."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


def send_signal(pid: int, number: int) -> None:
    """Send a signal to a process that may have ended already."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def how_ended(exit_code: int | None, number: int | None) -> str:
    if number is not None:
        return f"signal {signal_name(number)}"
    return "exit code unknown" if exit_code is None else f"exit code {exit_code}"


def has_open(pid: int, path: str) -> bool:
    """Whether the process has the file `path`, without links, open. Raises OSError."""
    return path in map(_target, Path(f"/proc/{pid}/fd").iterdir())


def _target(fd: Path) -> str:
    try:
        return str(fd.readlink())
    except OSError:  # closed in the meantime
        return ""


def last_lines(path: Path, lines: int = LOG_LINES) -> tuple[str, ...]:
    """The end of a text file; empty if it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - MOST_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return ()
    return bounded(text.splitlines()[-lines:])


def last_words_of(path: Path) -> tuple[str, ...]:
    """The last lines of a log without the frames of stacks."""
    return without_frames(Text.of(last_lines(path, MOST_LINES))).lines[-LOG_LINES:]


def nobody(ranks: Iterable[int]) -> None:
    """No rank is urged."""


async def gather_stacks(
    pids: Iterable[tuple[int, int]],
    traces: Path,
    timeout_s: float,
    missing: dict[int, str] | None = None,
    urge: Callable[[Iterable[int]], None] = nobody,
) -> dict[int, tuple[str, ...]]:
    """Ask each (rank, pid) for its Python stacks. Ranks that do not answer in time are left out.

    A thread of the rank appends to `rank-<r>.stacks`, so a rank answers even from inside a
    collective. A process that is stopped or in state D cannot answer, and this function does not
    wait for it.

    Args:
        missing: gets the reason for each rank whose answer could not be read from storage.
        urge: called once, with the ranks that have not answered after a part of the time. It may
            ask them with `STACKS_IN_C`.
    """
    asked, why = dict(pids), {} if missing is None else missing
    limit, reading = Limit(timeout_s), Limit(timeout_s + READ_S)
    try:
        # The ranks append, so the file may have the stacks of an earlier hang.
        before = await limit.within(_sizes, traces, asked)
    except TimeoutError:
        why.update(dict.fromkeys(asked, mute(traces)))
        return {}
    states = {rank: process_state(pid) for rank, pid in asked.items()}
    for rank, pid in asked.items():
        if states[rank] not in ("gone", "Z"):
            send_signal(pid, STACKS_SIGNAL)
    awaited = [rank for rank, state in states.items() if state not in SILENT]
    sizes, late = dict(before), Limit(PATIENT * timeout_s)
    try:
        while limit.left_s:
            await asyncio.sleep(min(STACK_POLL_S, limit.left_s))
            now = await reading.within(_sizes, traces, asked)
            silent = [rank for rank in awaited if now[rank] == before[rank]]
            # A file that still grows is not complete. When no file grows, all answers are complete.
            if now == sizes and not silent:
                break
            sizes = now
            if not late.left_s:
                urge(silent)
                urge = nobody
    except TimeoutError:
        why.update(dict.fromkeys(asked, mute(traces)))
    answered = {rank: start for rank, start in before.items() if sizes[rank] > start}
    return await _read_answers(traces, answered, reading, why)


async def _read_answers(
    traces: Path, answered: Mapping[int, int], reading: Limit, why: dict[int, str]
) -> dict[int, tuple[str, ...]]:
    """Read what each rank has written since `answered`, a place in its file."""
    stacks: dict[int, tuple[str, ...]] = {}

    async def read(rank: int) -> None:
        try:
            stacks[rank] = await reading.within(
                _read_from, _stacks_of(traces, rank), answered[rank]
            )
        except TimeoutError:
            why[rank] = mute(traces)
        except OSError as exc:
            why[rank] = f"cannot be read: {exc}"

    await asyncio.gather(*(read(rank) for rank in answered))
    return stacks


def mute(folder: Path) -> str:
    return f"reading {folder} timed out"


def _stacks_of(traces: Path, rank: int) -> Path:
    return traces / f"rank-{rank}.stacks"


def _sizes(traces: Path, ranks: Iterable[int]) -> dict[int, int]:
    return {rank: _size(_stacks_of(traces, rank)) for rank in ranks}


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _read_from(path: Path, start: int) -> tuple[str, ...]:
    with path.open("rb") as file:
        file.seek(start)
        text = file.read().decode(errors="replace")
    return shortened(of_the_program(text.splitlines()), STACK_LINES)
