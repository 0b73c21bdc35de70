"""Has imported what takes seconds to import, and forks torchrun and checks of the fabric as told.

    python -m orchestrator.agent.processes.fork_server --parent PID --lock FILE [MODULE …]

It reads orders, a line of JSON each, and does one after the other in a child: says that it has
`Begun`, and how it `Ended`. So nothing below it waits for imports, and no attempt sees other code
than the first. The kernel kills it when its parent dies, and the child when this does. The child
holds a shared lock on FILE, and so does all that it starts: when that is free, no process of the
host is left.
"""

import argparse
import importlib
import json
import os
import select
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, TextIO

from orchestrator.agent.processes.exec_in_fork import (
    FAILED,
    adopt_orphans,
    become,
    die_with_parent,
    find_name,
)
from orchestrator.contract.codec import decode, encode_tagged
from orchestrator.contract.files.env import TORCHRUN_PID
from orchestrator.contract.read_json import read_json


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Be torchrun: run `command` with its output in `log`, after all imports."""

    command: tuple[str, ...]
    environ: dict[str, str]
    title: str
    log: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Try:
    """Run `command`, which needs no more than the first module; its output is in the answer."""

    command: tuple[str, ...]
    environ: dict[str, str]
    title: str
    given: str
    """What it reads on its standard input."""


LaunchOrder = Run | Try


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    pid: int
    """Not given to another process before the next order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    code: int
    """Negative: the signal that ended it."""
    out: str
    err: str


LaunchAnswer = Begun | Ended


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="orchestrator.agent.processes.fork_server")
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--lock", type=Path, required=True)
    parser.add_argument("modules", nargs="*")
    args = parser.parse_args(argv)
    die_with_parent(args.parent)
    find_name()
    _ignore_signals_of_a_scheduler()
    # What is imported may print what it likes: to the agent's log, not among the answers.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    adopt_orphans()
    imports = Imports(args.modules)
    imports.next()
    orders = os.fdopen(os.dup(sys.stdin.fileno()))  # its buffer is not the program's
    child = None
    while line := _order(orders, imports):
        if child is not None:
            # Only now: the agent, which has heard of its end, sends it no signal any more.
            os.waitpid(child, 0)
        _bury()
        order: LaunchOrder = decode(LaunchOrder, read_json(line))
        if isinstance(order, Run):
            imports.rest()
        child = _carry_out(order, answers, args.lock, afresh=imports.failed)
    return 0


class Imports:
    """What failed is not said here: the program that needs it will."""

    def __init__(self, modules: Sequence[str]) -> None:
        self.waiting = list(modules)
        self.failed = False
        """Then a program is begun afresh: half of a library that is loaded already hides why the
        rest does not."""

    def next(self) -> None:
        if self.waiting:
            try:
                importlib.import_module(self.waiting.pop(0))
            except Exception:  # noqa: BLE001 - a library that does not load raises what it likes
                self.failed, self.waiting = True, []

    def rest(self) -> None:
        while self.waiting:
            self.next()


def _order(orders: TextIO, imports: Imports) -> str:
    """The next one; what is still to be imported is, as long as there is none."""
    while imports.waiting and not select.select([orders], [], [], 0)[0]:
        imports.next()
    return orders.readline()


def _bury() -> None:
    """What was left by a torchrun that was killed."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _ignore_signals_of_a_scheduler() -> None:
    """For torchrun as well, and until they decide otherwise for all that it starts.

    Slurm sends its warnings and SIGTERM to every process of a step. They are for the agent, and for
    ranks that know what to do; torchrun would end the ranks before they have saved anything.
    """
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)


def _carry_out(order: LaunchOrder, answers: TextIO, lock: Path, *, afresh: bool) -> int | None:
    """The child, which has ended and is not reaped; none where there is not even one."""
    try:
        with _files(order) as files:
            launcher = os.getpid()
            sys.stdout.flush()
            child = os.fork()
            if child == 0:
                _be(order, launcher, lock, files, afresh)
            _tell(answers, Begun(pid=child))
            ended = os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
            assert ended is not None  # it is by WNOHANG alone
            _tell(answers, _ended(ended, files if isinstance(order, Try) else None))
    except OSError as exc:
        _tell(answers, Ended(code=FAILED, out="", err=str(exc)))
        return None
    return child


def _ended(ended: os.waitid_result, files: tuple[int, int, int] | None) -> Ended:
    code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
    out, err = map(_written, files[1:]) if files else ("", "")
    return Ended(code=code, out=out, err=err)


@contextmanager
def _files(order: LaunchOrder) -> Iterator[tuple[int, int, int]]:
    """Standard input, output and error of what is ordered."""
    if isinstance(order, Run):
        out = os.open(order.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        files = (os.open(os.devnull, os.O_RDONLY), out, os.dup(out))
    else:
        files = (os.memfd_create("given"), os.memfd_create("out"), os.memfd_create("err"))
        os.write(files[0], order.given.encode())
        os.lseek(files[0], 0, os.SEEK_SET)
    try:
        yield files
    finally:
        for fd in files:
            os.close(fd)


def _tell(answers: TextIO, answer: LaunchAnswer) -> None:
    answers.write(json.dumps(encode_tagged(answer)) + "\n")
    answers.flush()


def _written(fd: int) -> str:
    os.lseek(fd, 0, os.SEEK_SET)
    with open(fd, "rb", closefd=False) as file:
        return file.read().decode(errors="replace")


def _be(
    order: LaunchOrder, launcher: int, lock: Path, files: tuple[int, int, int], afresh: bool
) -> NoReturn:
    """In the child; it never comes back to the launcher's loop."""
    os.setsid()
    for number, fd in enumerate(files):
        os.dup2(fd, number)
    own = {TORCHRUN_PID: str(os.getpid())} if isinstance(order, Run) else {}
    environ = order.environ | own
    become(order.command, environ, title=order.title, parent=launcher, lock=lock, afresh=afresh)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
