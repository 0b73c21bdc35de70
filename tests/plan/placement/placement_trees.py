"""Trees of switches, and traffic: all small trees, and random large ones."""

import itertools
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from functools import cache

from orchestrator.contract.mesh import Mesh
from orchestrator.contract.plan import Traffic

Shape = tuple["Shape", ...]
"""The children of a switch. A host is ()."""
Switches = Mapping[str, tuple[str, ...]]


def traffic(axis: str, size: int, collective: str = "all-gather") -> Traffic:
    return Traffic(
        axis=axis,
        collective=collective,
        what="weights",
        bytes_per_step=size,
        messages=1,
        level="spine",
        seconds=0.0,
        exposed_seconds=0.0,
    )


@cache
def trees(hosts: int) -> tuple[Shape, ...]:
    """Every tree of `hosts` hosts in which each switch has two or more children."""
    if hosts == 1:
        return ((),)
    found: list[Shape] = []
    for parts in _partitions(hosts, hosts - 1):
        alike = [(size, len(list(same))) for size, same in itertools.groupby(parts)]
        choices = [
            itertools.combinations_with_replacement(trees(size), many) for size, many in alike
        ]
        found += [tuple(itertools.chain(*chosen)) for chosen in itertools.product(*choices)]
    return tuple(found)


def _partitions(total: int, most: int) -> Iterator[tuple[int, ...]]:
    if total == 0:
        yield ()
    for first in range(min(total, most), 0, -1):
        for rest in _partitions(total - first, first):
            yield (first, *rest)


def switches_of(shape: Shape) -> dict[str, tuple[str, ...]]:
    """The hosts of a tree, h0, h1, …, and the switches above each."""
    return {f"h{number}": path for number, path in enumerate(_paths(shape, ()))}


def _paths(shape: Shape, above: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    if not shape:
        yield above
    for number, below in enumerate(shape):
        yield from _paths(below, (*above, f"s{number}") if below else above)


def meshes(nodes: int) -> Iterator[Mesh]:
    """Every mesh of `nodes` ranks without tp, because tp never leaves a host."""
    for degrees in itertools.product(range(1, nodes + 1), repeat=4):
        if math.prod(degrees) == nodes:
            pp, replicate, shard, cp = degrees
            yield Mesh(pp=pp, dp_replicate=replicate, dp_shard=shard, cp=cp)


ALL_KINDS: Sequence[Traffic] = (
    traffic("pp", 7, "send"),
    traffic("dp_replicate", 30, "all-reduce"),
    traffic("dp_shard", 100),
    traffic("cp", 55, "all-to-all"),
    traffic("dp_shard x cp", 11, "reduce-scatter"),
)

DEGREES = ((1, 1, 2, 3, 4, 6, 8), (1, 1, 2, 3, 4), (2, 4, 5, 8, 12, 16, 32, 64))


def large_case(seed: int) -> tuple[Mesh, Switches, Sequence[Traffic]]:
    """Spines, leaves and hosts, some hosts not free, and a mesh for more than half of the free
    ones.

    Axes send as in training. A rank gathers all weights along dp_shard, reduces its shard of the
    gradients along dp_replicate, and sends activations along pp.
    """
    rng = random.Random(seed)
    switches: Switches = {}
    while len(switches) < 10:  # of fewer, no mesh is large and fills more than half
        switches = _worn(rng)
    while True:
        degrees = [rng.choice(choices) for choices in DEGREES]
        if 9 <= math.prod(degrees) <= len(switches) <= 2 * math.prod(degrees):
            break
    pp, replicate, shard = degrees
    weights = rng.randrange(10**6, 10**7)
    sent = (
        traffic("pp", rng.randrange(weights // 1000, weights // 20), "send"),
        traffic("dp_replicate", rng.randrange(weights // 2, weights) // shard, "all-reduce"),
        traffic("dp_shard", weights),
        traffic("tp", 10 * weights, "all-reduce"),
    )
    return Mesh(pp=pp, dp_replicate=replicate, dp_shard=shard, tp=8), switches, sent


def _worn(rng: random.Random) -> Switches:
    hosts, leaves, spines = rng.choice([4, 8, 16]), rng.choice([2, 4, 8]), rng.choice([2, 3, 4])
    missing = rng.choice([0.0, 0.02, 0.1, 0.3])
    return {
        f"h{rng.randrange(10**9)}": (f"spine-{spine}", f"leaf-{leaf}")
        for spine in range(spines)
        for leaf in range(leaves)
        for _ in range(hosts)
        if rng.random() >= missing
    }
