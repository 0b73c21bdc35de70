"""End the processes of an agent from its own host. File locks show which processes are left."""

import contextlib
import os
import signal
from pathlib import Path

from ndctl.rank.regular_file import read_regular
from orchestrator.contract.files.run_dir import RunDir
from orchestrator.errors import BackendError
from orchestrator.posix.locks import is_free, is_held_alone
from orchestrator.seams import Clock

LEAVE_S = 15.0
"""Seconds between SIGTERM and SIGKILL, and between SIGKILL and an error."""
POLL_S = 0.05


def clear_host(run_dir: RunDir, host: str, clock: Clock) -> str:
    """End what is left of the agent of `host`. Returns what was left, as text.

    Raises:
        BackendError: a process does not exit.
        OSError: its locks cannot be read.
    """
    lock = run_dir.agent_lock(host)
    pid = pid_in(lock)
    state = state_of(pid)
    ended = end_holder(lock, clock, leave_s=0.0)
    await_free(run_dir.ranks_lock(host), clock)
    if ended is None:
        return f"its process on {host} had exited, and {host} is healthy"
    return f"its process {ended} on {host} still existed ({state}) and was killed"


def end_holder(lock: Path, clock: Clock, leave_s: float) -> int | None:
    """End the agent that holds `lock`: SIGTERM, and SIGKILL after `leave_s` seconds. Returns the
    last signalled process; None: no agent held the lock."""
    begun = clock.monotonic()
    told: int | None = None
    while is_held_alone(lock):
        number, pid = _number_in(lock), pid_in(lock)
        overdue = clock.monotonic() - begun >= leave_s
        if pid is not None and (overdue or pid != told):
            _signal(pid, signal.SIGKILL if overdue else signal.SIGTERM)
            told = pid
        if clock.monotonic() - begun > leave_s + LEAVE_S:
            raise BackendError(
                f"agent process {number} of this job does not exit",
                fix=f"inspect it with `ps -o pid,stat,wchan,cmd -p {number}`, and the holders of"
                f" its lock with `fuser -v {lock}`",
            )
        clock.sleep(POLL_S)
    return told


def kill_stopped(lock: Path, launch: int) -> int | None:
    """Kill the agent of this launch that holds `lock`, if a signal has stopped it. Returns the
    killed process. An agent that runs is left alone, because the leader may take it back."""
    pid = pid_in(lock)
    if pid is None or state_of(pid) != STATES["T"] or not _is_of_launch(pid, launch):
        return None
    _signal(pid, signal.SIGKILL)
    return pid


def _is_of_launch(pid: int, launch: int) -> bool:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return f"--launch={launch}".encode() in words


def pid_in(lock: Path) -> int | None:
    """The process whose id is in `lock` and that has the file open; None: it has ended. Without the
    second condition the id may belong to another program by now."""
    number = _number_in(lock)
    return number if number is not None and _has_open(number, lock) else None


def _number_in(lock: Path) -> int | None:
    try:
        return int(read_regular(lock))
    except (OSError, ValueError):
        return None


def _has_open(pid: int, path: Path) -> bool:
    try:
        wanted, files = path.stat(), [*Path(f"/proc/{pid}/fd").iterdir()]
    except OSError:  # the process has ended or belongs to another user
        return False
    for file in files:
        with contextlib.suppress(OSError):  # closed meanwhile
            found = file.stat()
            if (found.st_dev, found.st_ino) == (wanted.st_dev, wanted.st_ino):
                return True
    return False


def await_free(lock: Path, clock: Clock) -> None:
    """Wait until the ranks of an ended agent exit. The kernel kills them when their agent dies."""
    deadline = clock.monotonic() + LEAVE_S
    while not is_free(lock):
        if clock.monotonic() > deadline:
            raise BackendError(
                f"rank processes of this job are still running and hold {lock}",
                fix=f"list them with `fuser -v {lock}`, kill them with `fuser -k {lock}`",
            )
        clock.sleep(POLL_S)


STATES = {
    "T": "stopped by a signal",
    "t": "stopped by a debugger",
    "D": "waiting in the kernel",
    "Z": "a zombie",
}
"""Linux process state -> text, for unusual states."""


def state_of(pid: int | None) -> str:
    """The state of a process as text."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "gone"
    letter = stat[stat.rindex(")") + 2]
    return STATES.get(letter, "running")


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
