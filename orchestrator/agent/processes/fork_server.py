"""Imports once what takes seconds to import, then forks torchrun and all-reduce checks on order.

    python -m orchestrator.agent.processes.fork_server --parent PID --lock FILE [--learned FILE]
        [MODULE ...]

It reads orders from standard input, one line of JSON each, and runs one after the other in a child
process. For each it writes `Begun` and `Ended`. So restarts do not wait for imports, and all
attempts run the same code. The kernel kills it when its parent dies, and kills the child when it
dies itself. The child and all that it starts hold a shared lock on FILE: when the lock is free, no
process of this host's ranks is left.
"""

import argparse
import json
import os
import select
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn, TextIO

from msgspec import Struct

from ndctl.rank.parent_death import die_with_parent
from orchestrator.agent.processes.exec_in_fork import (
    FAILED,
    adopt_orphans,
    become,
    find_name,
)
from orchestrator.agent.processes.fork_server_imports import Imports, learned_in
from orchestrator.contract.codec import decode, encode_tagged
from orchestrator.contract.files.env import TORCHRUN_PID
from orchestrator.contract.read_json import read_json


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
    parser.add_argument("modules", nargs="*")
    args = parser.parse_args(argv)
    die_with_parent(args.parent)
    find_name()
    _ignore_signals_of_a_scheduler()
    # Imported libraries may print anything. Send that to the agent's log, not among the answers.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    adopt_orphans()
    imports = Imports(args.modules, [] if args.learned is None else learned_in(args.learned))
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


def _order(orders: TextIO, imports: Imports) -> str:
    """Wait for the next order, and import the remaining modules meanwhile."""
    while imports.left:
        timeout = None if imports.pipes else 0
        pipes = [orders.fileno(), *imports.pipes]
        if orders.fileno() in select.select(pipes, [], [], timeout)[0]:
            break
        imports.next()
    imports.pause()  # before orphans are reaped: a trial is a child too
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
