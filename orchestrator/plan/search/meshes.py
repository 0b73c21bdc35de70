"""Enumerates the meshes with the degrees of a spec. `rules` decides which of them can run."""

import math
from collections.abc import Iterator
from functools import lru_cache

from orchestrator.contract.mesh import AXES, Mesh
from orchestrator.contract.spec.job_spec import JobSpec


@lru_cache(maxsize=1024)
def divisors(number: int) -> tuple[int, ...]:
    """All divisors in ascending order."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return tuple(sorted({*small, *(number // n for n in small)}))


def meshes(spec: JobSpec, world: int) -> Iterator[Mesh]:
    """Every mesh of `world` ranks with the degrees that the spec fixes, small pp first."""
    wish = spec.parallel
    copies = wish.data != "fsdp"
    # Without FSDP every rank holds a whole copy of the weights, so nothing is sharded.
    degrees = (wish.pp, wish.dp_replicate, 1 if copies else wish.dp_shard, wish.cp, wish.tp)
    for found in _factors(tuple(degrees), world):
        yield Mesh(**dict(zip(AXES, found, strict=True)))


def _factors(wishes: tuple[int | str, ...], rest: int) -> Iterator[tuple[int, ...]]:
    wish, *others = wishes
    if not others:
        # The last axis takes all remaining ranks. A fixed degree must be exactly that number.
        if wish in ("auto", rest):
            yield (rest,)
        return
    for degree in divisors(rest) if wish == "auto" else [int(wish)]:
        if rest % degree == 0:
            for found in _factors(tuple(others), rest // degree):
                yield (degree, *found)


def simplicity(mesh: Mesh) -> tuple[int, ...]:
    """A sort key: fewer axes first, then the axes that are easiest to understand."""
    return (
        sum(degree > 1 for degree in mesh.degrees),
        mesh.pp,
        mesh.cp,
        mesh.dp_replicate,
        -mesh.tp,
    )


def world_size(spec: JobSpec) -> int:
    return spec.cluster.hosts * spec.cluster.gpus_per_host


def sequences_per_pass(spec: JobSpec, mesh: Mesh) -> int:
    """Sequences of one micro batch on all data-parallel ranks; `auto` counts as 1, the minimum."""
    micro = spec.train.micro_batch_size
    return mesh.data_parallel * (1 if micro == "auto" else micro)
