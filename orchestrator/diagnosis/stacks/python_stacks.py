"""Reads Python stacks of ranks by faulthandler and py-spy, and finds the rank that differs."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

FAULTHANDLER = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>\S+)')
PY_SPY = re.compile(r"^\s+(?P<function>[^\s(]+) \((?P<file>[^():]+):(?P<line>\d+)\)")
THREAD = re.compile(r"^(Current )?[Tt]hread ")
OUTERMOST = ("<module>", "_run_module_as_main")
"""Frames of the start of a program."""
PROGRAM = re.compile(r"trainer/__main__\.py\W.* in <module>|<module> \(\S*trainer/__main__\.py:")
"""The outermost frame of ndctl's trainer. Frames outside it belong to the process that forked the
rank."""
STARTER = re.compile(
    r"trainer/program/run\.py\W.* in (_run_python|_end)\b"
    r"|(_run_python|_end) \(\S*trainer/program/run\.py:"
)
"""The frame that starts a program of the user by runpy, or that ends the process after it."""
HELPER_LINES = 8
"""Number of frames of a thread that is not the main one, if there is no room for all."""
DEPTH = 6
"""Number of innermost frames by which two stacks are compared."""
TALKING = re.compile(
    r"torch/distributed/(distributed_c10d|_functional_collectives|c10d_logger|tensor/|_symmetric"
    r"|pipelining|device_mesh|fsdp|_composable)"
)
OF_THREADS = re.compile(r"(^|/)(threading|concurrent/futures/thread)\.py$")
"""The files in which Python waits for threads at its end."""
OF_NDCTL = re.compile(r"(^|/)(trainer/(program|rank)|ndctl/rank)/")
"""Folders of threads that ndctl has in a rank."""
LOOKED_AT = 4
"""If one of so many innermost frames is in torch.distributed, the rank waits for others."""


class Frame(NamedTuple):
    file: str
    function: str
    line: int

    def __str__(self) -> str:
        return f"{self.function} ({'/'.join(self.file.split('/')[-2:])}:{self.line})"


Place = tuple[tuple[str, str], ...]
"""File and function of the innermost frames."""
Stack = tuple[Frame, ...]
"""Innermost frame first."""


def main_stack(lines: Iterable[str]) -> Stack:
    """Stack of the thread that runs the program."""
    return _frames(main_thread(lines))


def main_thread(lines: Iterable[str]) -> Sequence[str]:
    """Lines of the thread whose outermost frame is a module. If there is none, lines of the last
    thread, because faulthandler prints the oldest thread last."""
    every = _threads(lines)
    threads = [thread for thread in every if _frames(thread)]
    mains = [thread for thread in threads if _frames(thread)[-1].function in OUTERMOST]
    return (mains or threads or every or [[]])[-1]


def of_the_program(lines: Iterable[str]) -> list[str]:
    """The lines without the frames that started the program, which are the same on every rank."""
    kept: list[str] = []
    for are_frames, some in groupby(lines, _is_frame):
        same = list(some)
        kept += _inside(same) if are_frames else same
    return kept


def _is_frame(line: str) -> bool:
    # faulthandler writes dots for the frames above the 100th.
    return bool(FAULTHANDLER.match(line) or PY_SPY.match(line) or line.strip() == "...")


def _inside(frames: list[str]) -> list[str]:
    """Frames of one thread up to the outermost one of the program. That one says what is cut."""
    end = _end_of_program(frames)
    cut = len(frames) - end
    if not end or not cut:
        return frames
    more = "more than " if frames[-1].strip() == "..." else ""
    count = f"{cut - bool(more)} frames" if cut - bool(more) > 1 else "1 frame"
    return [*frames[: end - 1], f"{frames[end - 1]} (started by {more}{count} of ndctl)"]


def _end_of_program(frames: Sequence[str]) -> int:
    """Number of frames of the program; all, if it cannot be told which ones started it."""
    for number, line in enumerate(frames):
        if PROGRAM.search(line):
            return number + 1
        if STARTER.search(line):
            while number and "<frozen runpy>" in frames[number - 1]:
                number -= 1
            return number
    return len(frames)


def shortened(lines: Sequence[str], most: int) -> tuple[str, ...]:
    """At most `most` lines in their order: the innermost frames and the outermost one of each
    thread. The main thread has priority, because ranks are compared by it."""
    if len(lines) <= most:
        return tuple(lines)
    main = main_thread(lines)
    left = most - min(most, len(main))
    kept: list[str] = []
    for thread in _threads(lines):
        if thread == main:
            kept += _cut(thread, most)
            continue
        few = _cut(thread, HELPER_LINES)
        if len(few) <= left:
            left -= len(few)
            kept += few
    return tuple(kept)


def _cut(thread: Sequence[str], most: int) -> Sequence[str]:
    return thread if len(thread) <= most else [*thread[: most - 1], thread[-1]]


def _threads(lines: Iterable[str]) -> list[list[str]]:
    threads: list[list[str]] = [[]]
    for line in lines:
        if THREAD.match(line):
            threads.append([])
        if line.strip():
            threads[-1].append(line)
    return [thread for thread in threads if thread]


def _frames(lines: Iterable[str]) -> Stack:
    matches = (FAULTHANDLER.match(line) or PY_SPY.match(line) for line in lines)
    return tuple(Frame(m["file"], m["function"], int(m["line"])) for m in matches if m)


LIBRARY = re.compile(r"(site|dist)-packages/|/lib/python3|^<frozen|(^|/)torch/")
"""Folders of frames that are not the program's own."""


def words_of(stack: Stack) -> str:
    """Where a rank is: the innermost frame, and the innermost frame of the program if that is
    another one. The frames between them rarely help a user."""
    own = next((frame for frame in stack if not LIBRARY.search(frame.file)), None)
    return str(stack[0]) if own in (None, stack[0]) else f"{stack[0]}, called by {own}"


def talks(stack: Stack) -> bool:
    """Whether the rank is in an operation together with other ranks."""
    return any(TALKING.search(frame.file) for frame in stack[:LOOKED_AT])


def joins_threads(stack: Stack) -> bool:
    """Whether the program has ended, and Python waits for threads of it that are no daemons."""
    inner = [frame for frame in stack if OF_THREADS.search(frame.file)]
    end = next((one for one in inner if one.function == "_shutdown"), None)
    return end is not None and tuple(inner[: inner.index(end) + 1]) == stack[: inner.index(end) + 1]


def other_threads(lines: Sequence[str]) -> list[Frame]:
    """Where threads besides the main one are: the innermost frame of the program in each."""
    main = main_thread(lines)
    stacks = [_frames(thread) for thread in _threads(lines) if thread != main]
    own = (
        next((frame for frame in stack if not LIBRARY.search(frame.file)), None)
        for stack in stacks
        if not any(OF_NDCTL.search(frame.file) for frame in stack)
    )
    return [*dict.fromkeys(frame for frame in own if frame is not None)]


def place(stack: Stack) -> Place:
    """Where a rank is, without line numbers and folders, which differ without meaning."""
    return tuple((frame.file.rsplit("/", 1)[-1], frame.function) for frame in stack[:DEPTH])


def outside(stacks: Mapping[int, Stack]) -> tuple[int, ...]:
    """Ranks that are not in torch.distributed, if most others are."""
    away = [rank for rank, stack in sorted(stacks.items()) if not talks(stack)]
    return tuple(away) if 2 * len(away) < len(stacks) else ()


def lonely(stacks: Mapping[int, Stack]) -> tuple[int, ...]:
    """The only rank that is at a place of its own while the others are together."""
    places = Counter(map(place, stacks.values()))
    alone = [rank for rank, stack in sorted(stacks.items()) if places[place(stack)] == 1]
    crowded = max(places.values(), default=0)
    return tuple(alone) if len(alone) == 1 and crowded >= 2 else ()
