"""A forked process becomes another program, which need not import what is there already.

What a program is born with it gets: its own arguments, environment, files, signals and name.
"""

import contextlib
import ctypes
import faulthandler
import os
import runpy
import signal
import socket
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import setproctitle

from orchestrator.posix.locks import share
from orchestrator.run_module import FLAGS

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
FAILED, NOT_FOUND = 1, 127
"""Exit codes: of an exception that nobody catches, and of a command that is not there."""

DRIVERS = ("/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/kfd", "/dev/dxg")
"""What a process has open once a GPU's driver has begun in it, which is of no use to a fork."""


def die_with_parent(parent: int) -> None:
    """Have the kernel send SIGKILL when the parent ends; leave at once if it already has."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)


def adopt_orphans() -> None:
    """Be the parent of what a process below this one leaves: the first process of a container may
    bury none, and their numbers are not given away as long as they are not buried."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value}) failed")


def become(
    command: Sequence[str],
    environ: Mapping[str, str],
    *,
    title: str,
    parent: int,
    lock: Path,
    afresh: bool = False,
) -> NoReturn:
    """Be `command`, which dies with `parent` and shares the lock on `lock`: within this process if
    it is a module for this very interpreter, as `entry.command` says it; else, or `afresh`, or
    where some import has begun a GPU's driver, by exec. Keeps no files open but standard input,
    output and error. Never comes back, whatever the program does.

    Args:
        title: what `ps` shows; cut to the length of this process's own command line, behind which
            its first environment stays legible in /proc.
    """
    try:
        die_with_parent(parent)
        share(lock)
        os.environ.clear()
        os.environ.update(environ)
        _handle_no_signal(environ)
        words = command[1 + len(FLAGS) :]
        is_ours = [*command[: -len(words)]] == [sys.executable, *FLAGS]
        if afresh or not is_ours or _has_a_driver():
            _exec(command)
        _let_go()
        setproctitle.setproctitle(title)
        sys.argv = [*words]
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as exc:
        if isinstance(exc.code, str):
            sys.stderr.write(f"{exc.code}\n")
        code = exc.code if isinstance(exc.code, int) else FAILED if exc.code else 0
    except BaseException:  # noqa: BLE001 - as the interpreter ends a program that raised
        traceback.print_exc()
        code = FAILED
    # Not the interpreter's way out: what is above in the stack belongs to another process.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def find_name() -> None:
    """Where the kernel keeps this process's command line; not found any more when the environment
    has changed. Forked processes need not look again."""
    os.environ["SPT_NOENV"] = "1"  # not over the environment
    setproctitle.getproctitle()
    del os.environ["SPT_NOENV"]


def _exec(command: Sequence[str]) -> NoReturn:
    try:
        os.execvp(command[0], list(command))
    except OSError as exc:
        sys.stderr.write(f"{command[0]} could not be started: {exc}\n")
        sys.exit(NOT_FOUND)


def _handle_no_signal(environ: Mapping[str, str]) -> None:
    """What is ignored is left so, as by exec."""
    faulthandler.disable()  # torchrun's would bury what a rank said before it was aborted
    if environ.get("PYTHONFAULTHANDLER"):
        faulthandler.enable()
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            own = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            signal.signal(number, own)


def _has_a_driver() -> bool:
    """Whether one that has begun here, or in the process that this was forked from."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda._is_in_bad_fork():  # torch's own word, and all it says
        return True
    return any(name in DRIVERS for _, name in _open_files())


def _let_go() -> None:
    """Of pipes and sockets of the process before: whose other ends wait for this one's would wait
    for ever. Their numbers stay taken, as objects that are still there may yet close them."""
    null = os.open(os.devnull, os.O_RDWR)
    for fd, name in list(_open_files()):
        if fd > 2 and not name.startswith("/"):
            os.dup2(null, fd, inheritable=False)


def leave_network() -> None:
    """Let go of what a fork was born with: a store's port, of which it is no part, and connections,
    which would seem to live on when the process before has ended."""
    null = os.open(os.devnull, os.O_RDWR)
    for fd, name in list(_open_files()):
        if name.startswith("socket:") and _family(fd) in (socket.AF_INET, socket.AF_INET6):
            os.dup2(null, fd, inheritable=False)
    os.close(null)


def _family(fd: int) -> int:
    sock = socket.socket(fileno=fd)
    try:
        return sock.family
    finally:
        sock.detach()


def _open_files() -> Iterator[tuple[int, str]]:
    """Number and name, as /proc has it: `socket:[7]` where there is no path."""
    for file in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the listing's own
            yield int(file.name), str(file.readlink())
