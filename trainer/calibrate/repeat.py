"""Times an operation on all ranks at once: warm-up, repetitions in equal number, median.

All ranks measure at the same time, because training does too: CPU ranks share the processors and
the memory of their host, and GPUs share its power and its links.
"""

import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from orchestrator.contract.messages.measurements import Sample

WARM_UP = 2
TOGETHER = 5
"""Repetitions between two looks at the clock, and at least."""
MOST = 200
SLICE_S, MOST_CALLS = 0.05, 1000
"""A repetition on a CPU calls the operation until it takes so long, but at most so often. If
processes share a processor, each runs for some milliseconds at a time: a shorter repetition would
mostly fit into one turn, and seem as fast as without the others."""

Run = Callable[[], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    what: str
    make: Callable[[], Run]
    """Creates the inputs, and returns what is timed."""
    size: Mapping[str, int] = field(default_factory=dict)
    kind: str = ""
    ranks: int = 1
    across: bool = False


def measure(task: Task, device: torch.device, share_s: float) -> Sample:
    """Repeat the operation for about `share_s` seconds. A collective: all ranks repeat it equally
    often, and get the same answer."""
    run = task.make()
    for _ in range(WARM_UP):
        run()
    (first,) = seconds_of(run, device, 1)
    calls = 1 if device.type == "cuda" else min(MOST_CALLS, 1 + int(SLICE_S / agree(first)))
    own: list[float] = []
    begun = time.monotonic()
    # A busy machine may take much longer than the first repetition did, so look again and again.
    while not own or (len(own) < MOST and agree(time.monotonic() - begun) < share_s):
        dist.barrier()
        own += seconds_of(run, device, TOGETHER, calls)
    found = everyones(own)
    return Sample(
        what=task.what,
        size=dict(task.size),
        kind=task.kind,
        ranks=task.ranks,
        across=task.across,
        seconds=found[len(found) // 2],
        low=found[round(0.1 * (len(found) - 1))],
        high=found[round(0.9 * (len(found) - 1))],
        repeats=len(own),
    )


def seconds_of(run: Run, device: torch.device, repeats: int, calls: int = 1) -> list[float]:
    """Seconds of the operation in each repetition, by events in the queue of a GPU.

    Args:
        calls: how often a repetition on a CPU calls the operation.
    """
    if device.type != "cuda":
        return [_host_seconds(run, calls) for _ in range(repeats)]
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    marks[0].record()
    for mark in marks[1:]:
        run()
        mark.record()
    torch.cuda.synchronize(device)
    return [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(marks)]


def _host_seconds(run: Run, calls: int) -> float:
    begun = time.perf_counter()
    for _ in range(calls):
        run()
    return (time.perf_counter() - begun) / calls


def agree(value: float) -> float:
    """The largest value of all ranks."""
    most = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return float(most.item())


def everyones(values: list[float]) -> list[float]:
    """The values of all ranks, sorted."""
    found: list[list[float]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(found, values)
    return sorted(value for own in found for value in own)


@contextmanager
def one_thread() -> Iterator[None]:
    """As ranks of a job compute."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
