"""Turns a forked process into another program without exec, to keep the modules it has imported.

The program gets its own arguments, environment, files, signal handlers and process title.
"""

import contextlib
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

from ndctl.rank.parent_death import die_with_parent, prctl
from orchestrator.posix.locks import share
from orchestrator.run_module import FLAGS

PR_SET_CHILD_SUBREAPER = 36
FAILED, NOT_FOUND = 1, 127
"""Exit codes: for an uncaught exception, and for a command that does not exist."""

DRIVERS = ("/dev/nvidia-uvm", "/dev/kfd", "/dev/dxg")
"""A process has one of these open once it has initialised a GPU driver. A fork of such a process
cannot use the driver. /dev/nvidiactl is not among them: a library that counts GPUs by NVML opens
it, and forks of its process can still use CUDA."""


def adopt_orphans() -> None:
    """Become the parent of orphaned descendants, so that this process can reap them. The first
    process of a container may not reap them, and then they keep their process ids."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)


def become(
    command: Sequence[str],
    environ: Mapping[str, str],
    *,
    title: str,
    parent: int,
    lock: Path,
    afresh: bool = False,
) -> NoReturn:
    """Run `command` in this process, as a module of this interpreter. Never returns.

    It uses exec if `command` is another program, if `afresh` is set, or if an import has
    initialised a GPU driver. The program keeps only standard input, output and error open.

    Args:
        parent: process id of the parent; the program dies with it.
        lock: file on which the program holds a shared lock.
        title: what `ps` shows. It is cut to the length of this process's own command line, so that
            the environment behind that stays readable in /proc.
    """
    try:
        # The kernel does not pass this setting on to a fork, so each process makes it itself.
        die_with_parent(parent)
        share(lock)
        os.environ.clear()
        os.environ.update(environ)
        _handle_no_signal(environ)
        words = command[1 + len(FLAGS) :]
        is_ours = [*command[: -len(words)]] == [sys.executable, *FLAGS]
        if afresh or not is_ours or open_driver():
            _exec(command)
        _let_go()
        setproctitle.setproctitle(title)
        sys.argv = [*words]
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as exc:
        # As the interpreter does: a text goes to standard error, and the exit code is 1.
        if isinstance(exc.code, str):
            sys.stderr.write(f"{exc.code}\n")
        code = exc.code if isinstance(exc.code, int) else FAILED if exc.code else 0
    except BaseException:  # noqa: BLE001 - the interpreter also catches all at the top
        traceback.print_exc()
        code = FAILED
    # Not sys.exit: the frames and exit handlers above belong to the process that forked this one.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def find_name() -> None:
    """Have setproctitle find where the kernel keeps this process's command line. It cannot find it
    once the environment has changed. Forked processes inherit the result."""
    os.environ["SPT_NOENV"] = "1"  # the title must not overwrite the environment
    setproctitle.getproctitle()
    del os.environ["SPT_NOENV"]


def _exec(command: Sequence[str]) -> NoReturn:
    try:
        os.execvp(command[0], list(command))
    except OSError as exc:
        sys.stderr.write(f"failed to start {command[0]}: {exc}\n")
        sys.exit(NOT_FOUND)


def _handle_no_signal(environ: Mapping[str, str]) -> None:
    """Reset handlers to the default, and leave ignored signals ignored, as exec does."""
    faulthandler.disable()  # torchrun's would write over the last output of an aborted rank
    if environ.get("PYTHONFAULTHANDLER"):
        faulthandler.enable()
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            signal.signal(number, default)


def open_driver() -> str:
    """What shows that a GPU driver was initialised in this process or in the one it was forked
    from; empty if none was."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda._is_in_bad_fork():  # torch has no public function for it
        return "torch.cuda"
    return next((name for _, name in _open_files() if name in DRIVERS), "")


def _let_go() -> None:
    """Close inherited pipes and sockets. A process at the other end would otherwise never see their
    end. Each descriptor is replaced by /dev/null, because old objects may still close its number.
    """
    null = os.open(os.devnull, os.O_RDWR)
    for fd, name in list(_open_files()):
        # Plain files stay open, among them the lock, which shows that this process lives.
        if fd > 2 and not name.startswith("/"):
            os.dup2(null, fd, inheritable=False)


def leave_network() -> None:
    """Close inherited network sockets: a store's port, and connections that would otherwise stay
    open when the parent has ended."""
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
    """Number and name in /proc of each descriptor. The name is a path or, e.g., `socket:[7]`."""
    for file in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the descriptor of this listing is closed by then
            yield int(file.name), str(file.readlink())
