"""Imports once what takes seconds to import, then forks torchrun and all-reduce checks on order.

    python -m orchestrator.agent.processes.fork_server --parent PID --lock FILE [--learned FILE]
        [--without MODULE] [MODULE ...]

It reads orders from standard input, one line of JSON each, and runs one after the other in a child
process. For each it writes `Begun` and `Ended`. So restarts do not wait for imports, and all
attempts run the same code. The kernel kills it when its parent dies, and kills the child when it
dies itself. The child and all that it starts hold a shared lock on FILE: when the lock is free, no
process of this host's ranks is left.
"""

import argparse
import importlib
import json
import os
import select
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import NoReturn, TextIO

from msgspec import Struct

from orchestrator.agent.processes.exec_in_fork import (
    FAILED,
    adopt_orphans,
    become,
    die_with_parent,
    find_name,
    open_driver,
)
from orchestrator.contract.codec import decode, encode_tagged
from orchestrator.contract.files.env import TORCHRUN_PID
from orchestrator.contract.read_json import read_json
from orchestrator.run_module import command

MOST_HARMFUL = 8
"""With more modules that cannot be imported here, none of the learned ones is."""


class Run(Struct, frozen=True, kw_only=True):
    """Run `command` (torchrun) with its output in `log`, after all imports."""

    command: tuple[str, ...]
    environ: dict[str, str]
    title: str
    log: str


class Try(Struct, frozen=True, kw_only=True):
    """Run `command`, which needs only the first of the modules. The answer has its output."""

    command: tuple[str, ...]
    environ: dict[str, str]
    title: str
    given: str
    """Its standard input."""


LaunchOrder = Run | Try


class Begun(Struct, frozen=True, kw_only=True):
    pid: int
    """No other process gets it before the next order, so it is safe to signal until then."""


class Ended(Struct, frozen=True, kw_only=True):
    code: int
    """The exit code; negative if a signal ended it."""
    out: str
    err: str


LaunchAnswer = Begun | Ended


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="orchestrator.agent.processes.fork_server")
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--lock", type=Path, required=True)
    parser.add_argument("--learned", type=Path, help="file with the names of more modules")
    parser.add_argument("--without", action="append", default=[], help="a module of that file")
    parser.add_argument("modules", nargs="*")
    args = parser.parse_args(argv)
    die_with_parent(args.parent)
    find_name()
    _ignore_signals_of_a_scheduler()
    # Imported libraries may print anything. Send that to the agent's log, not among the answers.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    adopt_orphans()
    learned = [] if args.learned is None else _learned(args.learned, args.without)
    imports = Imports(args.modules, learned, partial(_start_again, argv))
    # Each order needs the first module. The others are imported while no order waits.
    imports.next()
    orders = os.fdopen(os.dup(sys.stdin.fileno()))  # children must not inherit buffered orders
    child = None
    while line := _order(orders, imports):
        if child is not None:
            # Reap the child only now. Until its next order the agent may still signal this pid, so
            # the kernel must not give it to another process.
            os.waitpid(child, 0)
        _reap_orphans()
        order: LaunchOrder = decode(LaunchOrder, read_json(line))
        # An all-reduce check does not need the other modules, so it does not wait for them.
        if isinstance(order, Run):
            imports.rest()
        child = _carry_out(order, answers, args.lock, afresh=imports.failed)
    return 0


class Imports:
    """The modules to import. A failure is not reported here: the program that needs the module
    raises it again."""

    def __init__(
        self,
        modules: Sequence[str],
        learned: Sequence[str] = (),
        start_again: Callable[[str], NoReturn] | None = None,
    ) -> None:
        """
        Args:
            learned: modules that a user's script imported. If one of them starts threads, opens a
                GPU driver or fails, `start_again` is called with its name: forks of this process
                would have neither the threads nor a usable driver.
        """
        self.waiting = list(modules)
        self.learned = list(learned)
        self.start_again = start_again
        self.told = False
        self.failed = False
        """If so, programs are started by exec instead. In a fork, the half-imported library would
        hide the real error."""

    def next(self) -> None:
        if not self.waiting and self.learned:
            self._next_learned()
        if self.waiting:
            try:
                importlib.import_module(self.waiting.pop(0))
            except Exception:  # noqa: BLE001 - a library can raise any exception on import
                self.failed, self.waiting = True, []

    @property
    def left(self) -> bool:
        return bool(self.waiting or self.learned)

    def _next_learned(self) -> None:
        name, before = self.learned.pop(0), _threads()
        try:
            importlib.import_module(name)
        except Exception:  # noqa: BLE001 - a library can raise any exception on import
            fine = False
        else:
            fine = _threads() <= before and not open_driver()
        if not fine and self.start_again is not None:
            self.start_again(name)

    def rest(self) -> None:
        while self.left:
            self.next()
        if not self.told and (driver := open_driver()):
            self.told = True
            # To the agent's log. Some packages beside torch look for GPUs when they are imported.
            sys.stderr.write(
                f"a package initialised a GPU driver ({driver}), so ranks cannot be forked"
                " from the process that imported it: each attempt imports all modules again\n"
            )
            sys.stderr.flush()


def _learned(file: Path, without: Sequence[str]) -> list[str]:
    """The modules in `file`; none if it cannot be read, or if too many of them were harmful."""
    try:
        names = read_json(file.read_text())
    except (OSError, ValueError):
        return []
    if not isinstance(names, list) or len(without) > MOST_HARMFUL:
        return []
    return [name for name in names if isinstance(name, str) and name not in without]


def _start_again(argv: Sequence[str], harmful: str) -> NoReturn:
    """Replace this process by one that does not import `harmful`."""
    sys.stderr.write(
        f"{harmful} starts threads, opens a GPU driver or fails when it is imported, so each rank"
        " imports it itself\n"
    )
    sys.stderr.flush()
    program = [*command(sys.executable, "orchestrator.agent.processes.fork_server")]
    os.execv(program[0], [*program, "--without", harmful, *argv])


def _threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def _order(orders: TextIO, imports: Imports) -> str:
    """Wait for the next order, and import the remaining modules meanwhile."""
    while imports.left and not select.select([orders], [], [], 0)[0]:
        imports.next()
    return orders.readline()


def _reap_orphans() -> None:
    """Reap processes that a killed torchrun left behind."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _ignore_signals_of_a_scheduler() -> None:
    """Ignore them here and, by inheritance, in torchrun and in all that it starts.

    Slurm sends its warnings and SIGTERM to every process of a step. Only the agent and the ranks,
    which install their own handlers, should react: torchrun would end the ranks before they have
    saved a checkpoint.
    """
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)


def _carry_out(order: LaunchOrder, answers: TextIO, lock: Path, *, afresh: bool) -> int | None:
    """Run one order to its end. Returns the child, which is not reaped yet, or None if the fork
    failed."""
    try:
        with _files(order) as files:
            launcher = os.getpid()
            # Else the child would inherit buffered text and print it again.
            sys.stdout.flush()
            child = os.fork()
            if child == 0:
                _run_in_child(order, launcher, lock, files, afresh)
            _answer(answers, Begun(pid=child))
            ended = os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
            assert ended is not None  # None is possible only with WNOHANG
            _answer(answers, _ended(ended, files if isinstance(order, Try) else None))
    # The log cannot be opened, or no process can be created. A later order may succeed.
    except OSError as exc:
        _answer(answers, Ended(code=FAILED, out="", err=str(exc)))
        return None
    return child


def _ended(ended: os.waitid_result, files: tuple[int, int, int] | None) -> Ended:
    code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
    out, err = map(_written, files[1:]) if files else ("", "")
    return Ended(code=code, out=out, err=err)


@contextmanager
def _files(order: LaunchOrder) -> Iterator[tuple[int, int, int]]:
    """File descriptors for the child's standard input, output and error."""
    if isinstance(order, Run):
        out = os.open(order.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        files = (os.open(os.devnull, os.O_RDONLY), out, os.dup(out))
    else:
        # Not pipes: they hold 64 KiB, and this process reads nothing before the child has ended.
        files = (os.memfd_create("given"), os.memfd_create("out"), os.memfd_create("err"))
        os.write(files[0], order.given.encode())
        os.lseek(files[0], 0, os.SEEK_SET)
    try:
        yield files
    finally:
        for fd in files:
            os.close(fd)


def _answer(answers: TextIO, answer: LaunchAnswer) -> None:
    answers.write(json.dumps(encode_tagged(answer)) + "\n")
    answers.flush()


def _written(fd: int) -> str:
    os.lseek(fd, 0, os.SEEK_SET)
    with open(fd, "rb", closefd=False) as file:
        return file.read().decode(errors="replace")


def _run_in_child(
    order: LaunchOrder, launcher: int, lock: Path, files: tuple[int, int, int], afresh: bool
) -> NoReturn:
    """Runs in the child, and never returns to the loop of `main`."""
    os.setsid()
    for number, fd in enumerate(files):
        os.dup2(fd, number)
    own = {TORCHRUN_PID: str(os.getpid())} if isinstance(order, Run) else {}
    environ = order.environ | own
    become(order.command, environ, title=order.title, parent=launcher, lock=lock, afresh=afresh)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
