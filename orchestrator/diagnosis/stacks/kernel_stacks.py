"""Where a task stands in the kernel, by its stack there: in which function, of which module. Pure.

A stack begins with the scheduler and with a lock; the first function below those says what the task
waits for, as `nfs_wait_bit_killable` does of a server that does not answer.
"""

import re
from collections.abc import Iterable, Sequence

HUNG = re.compile(r"\bINFO: task .{1,80}:\d+ blocked for more than \d+ seconds\.?\s*$")
MOST_FRAMES = 30
"""Of a stack in the kernel's log, with the lines between its heading and the first."""
_FRAME = re.compile(
    r"(?:^|[\s\]])([A-Za-z_][\w.]{0,80})\+0x[0-9a-f]+/0x[0-9a-f]+(?: \[(\w+)\])?\s*$"
)
_UNSURE = re.compile(r"\s\? ")
"""Before a frame that the kernel only found on the stack."""
_WAITS = re.compile(
    r"_{0,3}(switch_to|schedule|io_schedule|preempt|context_switch|mutex|rt_mutex|rwsem|rwlock|down|"
    r"semaphore|call_rwsem|wait_for_com|wait_on_bit|wait_for_common|wait_woken|bit_wait|"
    r"out_of_line_wait|prepare_to_wait|rcu_|percpu_rwsem|osq_|os_acquire|portSync|do_wait)\w*"
)
"""Functions of the scheduler and of locks, which every wait has."""
_NOWHERE = frozenset({"", "0", "0xffffffffffffffff"})
"""What /proc/PID/wchan has of a task that runs, or that this user may not look at."""


def place_of(frames: Iterable[str]) -> str:
    """`FUNCTION of MODULE`, or a function of the kernel itself; empty where there is no stack."""
    known = [found.groups() for line in frames if (found := _FRAME.search(line))]
    below = [one for one in known if not _WAITS.fullmatch(one[0])]
    function, module = next(iter(below or known), ("", None))
    return f"{function} of {module}" if module else function


def place_of_process(stack: str, wchan: str) -> str:
    """By /proc/PID/stack, which root may read, else by /proc/PID/wchan."""
    return place_of(stack.splitlines()) or ("" if wchan.strip() in _NOWHERE else wchan.strip())


def with_places(kernel: Sequence[str]) -> list[str]:
    """A kernel's log, where each line of a task that hangs says also where, as its stack below."""
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
