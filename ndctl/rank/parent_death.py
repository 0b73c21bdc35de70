"""Ends a process with its parent, so that no rank survives the process that started it."""

import ctypes
import os
import signal

PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Have the kernel send SIGKILL to this process when its parent ends. Exit at once if the parent
    has ended already, because then the kernel would send nothing."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)


def prctl(option: int, value: int) -> None:
    """Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value}) failed")
