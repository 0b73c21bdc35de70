"""What a fork server imports: the modules that every rank needs, and those that it learned.

A learned module is one that the user's script imported in an earlier attempt. It may be harmful
here: it may start threads or open a GPU driver, and forks of this process would have neither the
threads nor a usable driver. So another process, the trial, imports each of them first.
"""

import gc
import importlib
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from ndctl.rank.parent_death import die_with_parent
from orchestrator.agent.processes.exec_in_fork import open_driver
from orchestrator.contract.read_json import read_json

MOST_HARMFUL = 8
"""With more harmful packages than this, the learned modules not tried yet are left to the ranks."""
HARMLESS = "."
"""The trial writes this for each harmless module. At a harmful one it writes why, and ends."""
FORK_SAFE = ("jemalloc_bg_thd",)
"""Names of threads that their library handles at a fork. pyarrow brings jemalloc, whose memory is
usable in a fork without its background thread. Without this exception, every library that uses
pandas would be left to the ranks, and each restart would import it again."""
NAMED_S = 0.1
"""A thread gives itself its name after it has started; some have ended by then."""
READ_BYTES = 1 << 16
REASON_CHARACTERS = 200


class Imports:
    """Imports one module at each call of `next`.

    A failure is not reported here: the program that needs the module raises it again.
    """

    def __init__(self, modules: Sequence[str], learned: Sequence[str] = ()) -> None:
        self.waiting = list(modules)
        self.untried = list(learned)
        self.harmful = 0
        """Number of packages that are left to the ranks."""
        self.told = False
        self.failed = False
        """If so, programs are started by exec instead. In a fork, the half-imported library would
        hide the real error."""
        self._trial: Trial | None = None

    @property
    def left(self) -> bool:
        return bool(self.waiting or self.untried or self._trial)

    @property
    def pipes(self) -> list[int]:
        """The file to read before the next call of `next`; empty: it need not wait."""
        return [] if self._trial is None or self.waiting else [self._trial.pipe]

    def next(self) -> None:
        if self.waiting:
            self._import(self.waiting.pop(0))
        elif self._trial is not None:
            self._follow(self._trial)
        elif self.untried:
            try:
                self._trial = Trial(self.untried)
            except OSError:  # no process can be created; the ranks import these modules
                self.untried = []

    def pause(self) -> None:
        """End the trial. A later `next` begins another one, with the modules that it did not
        reach."""
        if self._trial is not None:
            self._trial.end()
            self._trial = None

    def rest(self) -> None:
        """Import what may be imported. Modules that were not tried are left to the ranks."""
        self.pause()
        self.untried = []
        while self.waiting:
            self.next()
        if not self.told and (driver := open_driver()):
            self.told = True
            # Some packages beside torch look for GPUs when they are imported.
            _tell(
                f"a package initialised a GPU driver ({driver}), so ranks cannot be forked"
                " from the process that imported it: each attempt imports all modules again"
            )

    def _import(self, name: str) -> None:
        # Imports leave no garbage. Collection would make them one eighth slower, and would later
        # write to memory pages that the forks share.
        gc.disable()
        try:
            importlib.import_module(name)
        except Exception:  # noqa: BLE001 - a library can raise any exception on import
            self.failed, self.waiting = True, []
            self.untried = []
        gc.freeze()
        gc.enable()

    def _follow(self, trial: "Trial") -> None:
        harmless = trial.read()
        self.waiting += self.untried[:harmless]
        del self.untried[:harmless]
        if trial.is_over:
            self._trial = None
            trial.end()
            if self.untried:
                self._leave(self.untried[0], trial.reason or "ends the process")

    def _leave(self, name: str, reason: str) -> None:
        """Leave the package of `name` to the ranks. The next trial is of the modules after it."""
        package = name.partition(".")[0]
        _tell(f"{name} {reason} when it is imported, so each rank imports {package} itself")
        self.harmful += 1
        self.untried = [one for one in self.untried if one.partition(".")[0] != package]
        if self.harmful > MOST_HARMFUL:
            self.untried = []


class Trial:
    """A fork of this process that imports modules, until one of them is harmful."""

    def __init__(self, modules: Sequence[str]) -> None:
        self.pipe, results = os.pipe()
        self.is_over = False
        self.reason = ""
        """Why the first module that is not harmless is harmful; empty: it ended the process."""
        parent = os.getpid()
        self._pid = os.fork()
        if self._pid == 0:
            _try(modules, results, parent)
        os.close(results)

    def read(self) -> int:
        """Wait for results. Returns how many more modules are harmless."""
        text = os.read(self.pipe, READ_BYTES).decode(errors="replace")
        self.is_over = not text
        harmless = 0 if self.reason else len(text) - len(text.lstrip(HARMLESS))
        self.reason += text[harmless:]
        return harmless

    def end(self) -> None:
        os.close(self.pipe)
        # The group is there once the process has made it. Modules may have started more processes.
        for kill in (os.killpg, os.kill):
            with suppress(ProcessLookupError):
                kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)


def _try(modules: Sequence[str], results: int, parent: int) -> NoReturn:
    os.setsid()
    die_with_parent(parent)
    null = os.open(os.devnull, os.O_RDWR)
    for fd in range(3):
        os.dup2(null, fd)  # what a module prints, it prints once more when it is really imported
    # The threads of OpenBLAS are no harm: it ends them before a fork and starts them again. Others
    # cannot be told from them, so here it gets none.
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # noqa: TID251 (of this process alone)
    before = _threads()
    for name in modules:
        harm = _harm(name, before)
        os.write(results, (harm or HARMLESS).encode())
        if harm:
            break
    os._exit(0)


def _harm(name: str, before: Mapping[str, str]) -> str:
    """Import a module. Returns what it does that forks of this process cannot have; empty if it
    does nothing of the kind."""
    try:
        importlib.import_module(name)
    except BaseException as exc:  # noqa: BLE001 - a library can raise any exception on import
        return f"raises {type(exc).__name__}: {exc}"[:REASON_CHARACTERS].replace("\n", " ")
    if driver := open_driver():
        return f"initialises a GPU driver ({driver})"
    started = _started(before)
    if started:
        time.sleep(NAMED_S)  # noqa: TID251 (a real process, and no decision waits for it)
        started = _started(before)
    if not started:
        return ""
    # A thread without a name of its own has the name of the process.
    names = ", ".join(sorted({*started} - {*before.values()}))
    return f"starts {len(started)} thread{'s' * (len(started) > 1)}" + f" ({names})" * bool(names)


def _started(before: Mapping[str, str]) -> list[str]:
    """Names of the threads that forks of this process would need."""
    new = (name for number, name in _threads().items() if number not in before)
    return [name for name in new if name not in FORK_SAFE]


def _threads() -> dict[str, str]:
    """The name of each thread of this process, by its id."""
    found = {}
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it has just ended
            found[task.name] = (task / "comm").read_text().strip()
    return found


def _tell(text: str) -> None:
    """Write to the agent's log."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def learned_in(file: Path) -> list[str]:
    """The modules in `file`; none if it cannot be read."""
    try:
        names = read_json(file.read_text())
    except (OSError, ValueError):
        return []
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
