"""The processes of an agent, ended from its own host: who holds which lock says what is left."""

import contextlib
import os
import signal
from pathlib import Path

from orchestrator.errors import BackendError
from orchestrator.posix.locks import is_free, is_held_alone
from orchestrator.seams import Clock

LEAVE_S = 15.0
"""For an agent that was told to go (SIGTERM) before it is killed; and for one that was killed to be
gone."""
POLL_S = 0.05


def end_holder(lock: Path, clock: Clock, leave_s: float) -> int | None:
    """End the agent that holds `lock`: SIGTERM, and SIGKILL after `leave_s`. The process that was
    last told to go; None where none had to be."""
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
                f"process {number}, an agent of this job, does not end",
                fix=f"look at it with `ps -o pid,stat,wchan,cmd -p {number}`, and at who holds its"
                f" lock with `fuser -v {lock}`",
            )
        clock.sleep(POLL_S)
    return told


def pid_in(lock: Path) -> int | None:
    """The process that wrote its number into `lock` and has it open; None where there is none: the
    number of one that has ended may be another program's by now."""
    number = _number_in(lock)
    return number if number is not None and _has_open(number, lock) else None


def _number_in(lock: Path) -> int | None:
    try:
        return int(lock.read_text())
    except (OSError, ValueError):
        return None


def _has_open(pid: int, path: Path) -> bool:
    try:
        wanted, files = path.stat(), [*Path(f"/proc/{pid}/fd").iterdir()]
    except OSError:  # it has ended, or is another user's
        return False
    for file in files:
        with contextlib.suppress(OSError):  # closed meanwhile
            found = file.stat()
            if (found.st_dev, found.st_ino) == (wanted.st_dev, wanted.st_ino):
                return True
    return False


def await_free(lock: Path, clock: Clock) -> None:
    """Wait for the ranks of an agent that is gone, which the kernel ends with it."""
    deadline = clock.monotonic() + LEAVE_S
    while not is_free(lock):
        if clock.monotonic() > deadline:
            raise BackendError(
                f"processes of this job's ranks still run; they hold {lock}",
                fix=f"look at them with `fuser -v {lock}`, end them with `fuser -k {lock}`",
            )
        clock.sleep(POLL_S)


STATES = {
    "T": "stopped by a signal",
    "t": "stopped by a debugger",
    "D": "waiting in the kernel",
    "Z": "dead, and not buried",
}
"""Unusual process states, by Linux's letter."""


def state_of(pid: int | None) -> str:
    """The state of a process, in words."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "gone"
    letter = stat[stat.rindex(")") + 2]
    return STATES.get(letter, "running")


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
