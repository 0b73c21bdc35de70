"""Imports in a fork server what the ranks of a user's script have imported, a module at a time.

A module that starts threads or initialises a GPU driver when it is imported must not be imported
here: forks of this process would have neither its threads nor a usable driver. So a child process
tries all modules first.
"""

import contextlib
import importlib
import math
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from orchestrator.agent.processes.exec_in_fork import die_with_parent, open_driver
from orchestrator.contract.read_json import read_json

FILE_S = 1.0
"""Seconds between two looks for the file."""
TRIAL_S = 0.1
MOST_TRIALS = 5
"""Each trial finds at least one module that must not be imported. After so many, none is."""
HARMFUL = "!"
"""Mark of a harmful module in the report of a trial."""


class Learning:
    """Advances while its process has nothing else to do."""

    def __init__(self, file: Path | None) -> None:
        self.file = file
        self.waiting: list[str] = []
        """Modules that a trial found harmless and that are not imported yet."""
        self.harmful: set[str] = set()
        self.trials = 0
        self.trial: _Trial | None = None
        self.failed: list[str] = []

    def advance(self) -> float:
        """Do the next small part. Returns seconds until it should be called again; infinite if
        nothing is left to do."""
        if self.waiting:
            self._import(self.waiting.pop(0))
            return 0.0
        if self.trial is not None:
            return self._look_at_trial(self.trial)
        if self.file is None:
            return math.inf
        names = _read(self.file)
        if names is None:
            return FILE_S
        self._try_out([name for name in names if name not in sys.modules])
        return TRIAL_S

    def pause(self) -> None:
        """Give the processor to the ranks that are about to start. The trial begins again later."""
        if self.trial is not None:
            self.trial.kill()
            self.trial = None

    def _try_out(self, names: Sequence[str]) -> None:
        names = [name for name in names if name not in self.harmful]
        if names and self.trials < MOST_TRIALS:
            self.trials += 1
            self.trial = _Trial(names)
        else:
            self.file = None

    def _look_at_trial(self, trial: "_Trial") -> float:
        if not trial.ended():
            return TRIAL_S
        self.trial, found = None, trial.harmful()
        if found:
            self.harmful |= found
            sys.stderr.write(
                f"not imported before ranks start: {', '.join(sorted(found))}: it starts threads,"
                " opens a GPU driver, or fails when it is imported\n"
            )
            sys.stderr.flush()
            # What imports a harmful module is harmful too, and only a new process shows it.
            self._try_out(trial.names)
            return TRIAL_S
        self.waiting, self.file = list(trial.names), None
        return 0.0

    def _import(self, name: str) -> None:
        try:
            importlib.import_module(name)
        except Exception:  # noqa: BLE001 - a library can raise any exception on import
            self.failed.append(name)


def _read(file: Path) -> list[str] | None:
    """None: the file does not exist yet, or is not readable."""
    try:
        names = read_json(file.read_text())
    except (OSError, ValueError):
        return None
    return [str(name) for name in names] if isinstance(names, list) else None


class _Trial:
    """A child process that imports the modules one by one and writes the name of each."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = [*names]
        self.out = os.memfd_create("trial")
        parent = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            _import_all(self.names, self.out, parent)

    def ended(self) -> bool:
        with contextlib.suppress(ChildProcessError):  # reaped with the orphans
            return os.waitpid(self.pid, os.WNOHANG)[0] != 0
        return True

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self.out)

    def harmful(self) -> set[str]:
        """Called once, after the end."""
        size = os.fstat(self.out).st_size
        lines = os.pread(self.out, size, 0).decode().splitlines()
        os.close(self.out)
        found = {line.removesuffix(HARMFUL) for line in lines if line.endswith(HARMFUL)}
        # It ended in the middle: the module that it was importing killed it.
        if len(lines) < len(self.names):
            found.add(self.names[len(lines)])
        return found


def _import_all(names: Sequence[str], out: int, parent: int) -> NoReturn:
    try:
        die_with_parent(parent)
        os.nice(10)  # the ranks of the running attempt need the processors more
        null = os.open(os.devnull, os.O_RDWR)
        for fd in range(3):
            os.dup2(null, fd)
        for name in names:
            before = _threads()
            try:
                importlib.import_module(name)
                ok = _threads() <= before and not open_driver()
            except Exception:  # noqa: BLE001 - a library can raise any exception on import
                ok = False
            os.write(out, f"{name}{'' if ok else HARMFUL}\n".encode())
    finally:
        os._exit(0)


def _threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))
