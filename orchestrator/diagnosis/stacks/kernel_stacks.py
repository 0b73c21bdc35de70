"""Finds where a task waits in the kernel, by its kernel stack: the function and its module. Pure.

A stack begins with functions of the scheduler and of locks. The first function below them says what
the task waits for, such as `nfs_wait_bit_killable` for an NFS server.
"""

import re
from collections.abc import Iterable, Sequence

HUNG = re.compile(r"\bINFO: task .{1,80}:\d+ blocked for more than \d+ seconds\.?\s*$")
MOST_FRAMES = 30
"""Lines of a stack in the kernel log that are read, including those before the first frame."""
_FRAME = re.compile(
    r"(?:^|[\s\]])([A-Za-z_][\w.]{0,80})\+0x[0-9a-f]+/0x[0-9a-f]+(?: \[(\w+)\])?\s*$"
)
_UNSURE = re.compile(r"\s\? ")
"""Marks a frame that the kernel found on the stack but is not sure about."""
_WAITS = re.compile(
    r"_{0,3}(switch_to|schedule|io_schedule|preempt|context_switch|mutex|rt_mutex|rwsem|rwlock|down|"
    r"semaphore|call_rwsem|wait_for_com|wait_on_bit|wait_for_common|wait_woken|bit_wait|"
    r"out_of_line_wait|prepare_to_wait|rcu_|percpu_rwsem|osq_|os_acquire|portSync|do_wait)\w*"
)
"""Functions of the scheduler and of locks, which are part of every wait."""
_NOWHERE = frozenset({"", "0", "0xffffffffffffffff"})
"""What /proc/PID/wchan contains for a running task, or one that this user may not inspect."""


def place_of(frames: Iterable[str]) -> str:
    """`FUNCTION of MODULE`, or a function of the kernel itself; empty if there is no stack."""
    known = [found.groups() for line in frames if (found := _FRAME.search(line))]
    below = [one for one in known if not _WAITS.fullmatch(one[0])]
    function, module = next(iter(below or known), ("", None))
    return f"{function} of {module}" if module else function


def place_of_process(stack: str, wchan: str) -> str:
    """By /proc/PID/stack, which only root can read, else by /proc/PID/wchan."""
    return place_of(stack.splitlines()) or ("" if wchan.strip() in _NOWHERE else wchan.strip())


def with_places(kernel: Sequence[str]) -> list[str]:
    """A kernel log in which each line about a hung task also says where the task waits, as shown in
    its stack below the line."""
    return [
        f"{line.rstrip().rstrip('.')}, in {place}"
        if HUNG.search(line) and (place := place_of(_stack_below(kernel, number)))
        else line
        for number, line in enumerate(kernel)
    ]


def _stack_below(kernel: Sequence[str], number: int) -> list[str]:
    frames: list[str] = []
    for line in kernel[number + 1 : number + 1 + MOST_FRAMES]:
        if HUNG.search(line):
            break
        if not _UNSURE.search(line):
            frames.append(line)
    return frames
