"""Stands by with what takes seconds to import, and becomes torchrun when it is told to.

    python -m orchestrator.agent.launcher --parent PID --lock FILE [MODULE …]

It reads orders, a line of JSON each. A `Try` is run by a child and answered with a line; a `Run` it
becomes. The kernel kills it when its parent dies. Whoever does what was ordered holds a shared lock
on FILE, and so does all that is started then: when that is free, no process of the host is left.
"""

import argparse
import importlib
import json
import os
import runpy
import signal
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from orchestrator.agent.keeper import die_with_parent
from orchestrator.contract.codec import decode, encode
from orchestrator.contract.env import TORCHRUN_PID
from orchestrator.locks import share

FAILED, NOT_FOUND = 1, 127
"""Exit codes: of an exception that nobody catches, and of a command that is not there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Become `command`, with its output in `log`."""

    command: tuple[str, ...]
    environ: dict[str, str]
    log: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Try:
    """Run `command` to its end."""

    command: tuple[str, ...]
    environ: dict[str, str]
    given: str
    """What it reads on its standard input."""


LaunchOrder = Run | Try


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    code: int | None
    """Negative: the signal that ended it."""
    out: str
    err: str


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="orchestrator.agent.launcher")
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--lock", type=Path, required=True)
    parser.add_argument("modules", nargs="*")
    args = parser.parse_args(argv)
    die_with_parent(args.parent)
    _ignore_signals_of_a_scheduler()
    imported = all(list(map(_imported, args.modules)))
    orders = os.fdopen(os.dup(sys.stdin.fileno()))  # its buffer is not the program's
    for line in orders:
        order: LaunchOrder = decode(LaunchOrder, json.loads(line))
        if isinstance(order, Run):
            share(args.lock)
            _run(order, imported)
        sys.stdout.write(json.dumps(encode(_try(order, args.lock, imported))) + "\n")
        sys.stdout.flush()
    return 0


def _imported(name: str) -> bool:
    """Whether it could be. What failed is not said here: the program that needs it will."""
    try:
        importlib.import_module(name)
    except Exception:  # noqa: BLE001 - a library that does not load raises what it likes
        return False
    return True


def _ignore_signals_of_a_scheduler() -> None:
    """For the program and, until they decide otherwise, all that it starts.

    Slurm sends its warnings and SIGTERM to every process of a step. They are for the agent, and for
    ranks that know what to do; torchrun would end the ranks before they have saved anything.
    """
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)


def _run(order: Run, imported: bool) -> NoReturn:
    out = os.open(order.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    environ = order.environ | {TORCHRUN_PID: str(os.getpid())}
    _become(order.command, environ, _null(), out, out, imported)


def _null() -> int:
    return os.open(os.devnull, os.O_RDONLY)


def _try(order: Try, lock: Path, imported: bool) -> Tried:
    given, out, err = (os.memfd_create(name) for name in ("given", "out", "err"))
    try:
        os.write(given, order.given.encode())
        os.lseek(given, 0, os.SEEK_SET)
        launcher = os.getpid()
        child = os.fork()
        if child == 0:
            _be_tried(order, launcher, lock, imported, (given, out, err))
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        return Tried(code=code, out=_written(out), err=_written(err))
    finally:
        for fd in (given, out, err):
            os.close(fd)


def _written(fd: int) -> str:
    os.lseek(fd, 0, os.SEEK_SET)
    with open(fd, "rb", closefd=False) as file:
        return file.read().decode(errors="replace")


def _be_tried(
    order: Try, launcher: int, lock: Path, imported: bool, files: tuple[int, int, int]
) -> NoReturn:
    """In the child; it must never come back to the launcher's loop."""
    try:
        die_with_parent(launcher)
        share(lock)
        _become(order.command, order.environ, *files, imported)
    except SystemExit as exc:
        code = exc.code if isinstance(exc.code, int) else FAILED if exc.code else 0
    except BaseException:  # noqa: BLE001 - as the interpreter ends a program that raised
        traceback.print_exc()
        code = FAILED
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _become(
    command: Sequence[str],
    environ: Mapping[str, str],
    given: int,
    out: int,
    err: int,
    imported: bool,
) -> NoReturn:
    """Be `command`: at once where it is a module for this very interpreter, which has imported what
    it needs. After an import that failed it is begun afresh: half of a library that is loaded
    already hides why the rest does not.

    Raises:
        SystemExit: with its exit code.
        BaseException: what it raised.
    """
    for number, fd in enumerate((given, out, err)):
        os.dup2(fd, number)
    os.environ.clear()
    os.environ.update(environ)
    program, *words = command
    if not imported or (program, words[:1]) != (sys.executable, ["-m"]):
        try:
            os.execvp(program, list(command))
        except OSError as exc:
            sys.stderr.write(f"{program} could not be started: {exc}\n")
            sys.exit(NOT_FOUND)
    sys.argv = words[1:]
    runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    sys.exit(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
