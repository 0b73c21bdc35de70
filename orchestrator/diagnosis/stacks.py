"""Python stacks of ranks, as faulthandler and py-spy write them: where each is, who is alone."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

FAULTHANDLER = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>\S+)')
PY_SPY = re.compile(r"^\s+(?P<function>[^\s(]+) \((?P<file>[^():]+):(?P<line>\d+)\)")
THREAD = re.compile(r"^(Current )?[Tt]hread ")
DEPTH = 6
"""Innermost frames by which two stacks are told apart."""
TALKING = re.compile(
    r"torch/distributed/(distributed_c10d|_functional_collectives|c10d_logger|tensor/|_symmetric"
    r"|pipelining|device_mesh|fsdp|_composable)"
)
LOOKED_AT = 4
"""Innermost frames among which one of torch.distributed says that the rank waits for others."""


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
    """Of the thread that runs the program: the one whose outermost frame is a module's."""
    threads: list[list[Frame]] = [[]]
    for line in lines:
        if THREAD.match(line):
            threads.append([])
        found = FAULTHANDLER.match(line) or PY_SPY.match(line)
        if found:
            frame = Frame(found["file"], found["function"], int(found["line"]))
            threads[-1].append(frame)
    threads = [frames for frames in threads if frames]
    if not threads:
        return ()
    mains = [frames for frames in threads if frames[-1].function == "<module>"]
    return tuple((mains or threads)[-1])


def talks(stack: Stack) -> bool:
    """Whether the rank is inside an operation that it does together with others."""
    return any(TALKING.search(frame.file) for frame in stack[:LOOKED_AT])


def place(stack: Stack) -> Place:
    """Where a rank is, without lines and folders, which differ without meaning anything."""
    return tuple((frame.file.rsplit("/", 1)[-1], frame.function) for frame in stack[:DEPTH])


def outside(stacks: Mapping[int, Stack]) -> tuple[int, ...]:
    """Ranks that are not inside torch.distributed, where most others are."""
    away = [rank for rank, stack in sorted(stacks.items()) if not talks(stack)]
    return tuple(away) if 2 * len(away) < len(stacks) else ()


def lonely(stacks: Mapping[int, Stack]) -> tuple[int, ...]:
    """The one rank that is somewhere where nobody else is, while others are together."""
    places = Counter(map(place, stacks.values()))
    alone = [rank for rank, stack in sorted(stacks.items()) if places[place(stack)] == 1]
    crowded = max(places.values(), default=0)
    return tuple(alone) if len(alone) == 1 and crowded >= 2 else ()
