"""Which degrees a spec means; whether they can be is for `constraints` and `refusals`."""

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache

from orchestrator.contract.mesh import AXES, Mesh
from orchestrator.contract.spec.job_spec import JobSpec
from orchestrator.inventory.profile import blocks_hold
from orchestrator.plan.model.shape import ModelShape


@lru_cache(maxsize=1024)
def divisors(number: int) -> tuple[int, ...]:
    """From 1 up."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return tuple(sorted({*small, *(number // n for n in small)}))


def meshes(spec: JobSpec, world: int) -> Iterator[Mesh]:
    """Every mesh of `world` ranks that keeps the degrees which the spec fixes, simple ones first
    among those with the same pp."""
    wish = spec.parallel
    copies = wish.data != "fsdp"
    degrees = (wish.pp, wish.dp_replicate, 1 if copies else wish.dp_shard, wish.cp, wish.tp)
    for found in _factors(tuple(degrees), world):
        yield Mesh(**dict(zip(AXES, found, strict=True)))


def _factors(wishes: tuple[int | str, ...], rest: int) -> Iterator[tuple[int, ...]]:
    wish, *others = wishes
    if not others:
        if wish in ("auto", rest):
            yield (rest,)
        return
    for degree in divisors(rest) if wish == "auto" else [int(wish)]:
        if rest % degree == 0:
            for found in _factors(tuple(others), rest // degree):
                yield (degree, *found)


def simplicity(mesh: Mesh) -> tuple[int, ...]:
    """The fewer axes, and the more of the work on those that are easiest to reason about, the
    smaller."""
    return (
        sum(degree > 1 for degree in mesh.degrees),
        mesh.pp,
        mesh.cp,
        mesh.dp_replicate,
        -mesh.tp,
    )


def tensor_split(spec: JobSpec, shape: ModelShape, cp: int) -> dict[str, int]:
    """What tensor and sequence parallelism split, each into equal parts."""
    if cp == 1:
        tokens = {"tokens of a sequence": spec.data.sequence_length}
    else:
        # Where cp does not divide the sequence, that is said of cp and not of tp.
        tokens = {"tokens of a cp rank's part": math.ceil(spec.data.sequence_length / cp)}
        tokens = tokens if spec.data.sequence_length % cp == 0 else {}
    return {
        "heads": shape.num_heads,
        "kv heads": shape.num_kv_heads,
        "vocabulary entries": shape.vocab_size,
        "intermediate columns": shape.intermediate_size,
        **tokens,
    }


def ulysses_refusals(shape: ModelShape, tp: int, cp: int) -> list[str]:
    """Heads that Ulysses cannot deal out to `cp` ranks; kv heads are copied where there are fewer
    than ranks."""
    of_rank = " of a tp rank" if tp > 1 else ""
    heads, kv_heads = shape.num_heads // tp, max(1, shape.num_kv_heads // tp)
    uneven = [f"divide the {heads} heads{of_rank}"] if heads % cp else []
    if kv_heads % cp and cp % kv_heads:
        uneven.append(f"divide, or be a multiple of, the {kv_heads} kv heads{of_rank}")
    return uneven


Blocks = Sequence[int]
"""Sizes of NVLink blocks, as in `Fabric.blocks`."""


def stays_near(spec: JobSpec, blocks: Blocks, tp: int) -> bool:
    """Whether groups of `tp` ranks share hosts, or take whole hosts of one NVLink block."""
    hosts, ranks = spec.cluster.hosts, spec.cluster.gpus_per_host
    if ranks % tp == 0 or not blocks:
        return ranks % tp == 0
    return tp % ranks == 0 and blocks_hold(blocks, tp // ranks, hosts)


def tensor_degrees(spec: JobSpec, shape: ModelShape, cp: int, blocks: Blocks) -> list[int]:
    """Every tp that stays inside a host or an NVLink block and divides what it splits; the largest
    first."""
    if spec.train.compile or shape.fused:
        return [1]  # see `refusals`
    parts = tensor_split(spec, shape, cp).values()
    hosts, ranks = spec.cluster.hosts, spec.cluster.gpus_per_host
    wide = [ranks * many for many in divisors(hosts)[1:] if stays_near(spec, blocks, ranks * many)]
    return [
        t
        for t in reversed([*divisors(ranks), *wide])
        if all(part % t == 0 for part in parts) and _leaves_heads(spec, shape, t, cp)
    ]


def _leaves_heads(spec: JobSpec, shape: ModelShape, tp: int, cp: int) -> bool:
    ulysses = cp > 1 and spec.parallel.context == "ulysses"
    return tp == 1 or not ulysses or not ulysses_refusals(shape, tp, cp)


def likely_mesh(spec: JobSpec, shape: ModelShape, blocks: Blocks) -> Mesh:
    """The degrees of `spec`, with each `auto` as it would be were there nothing else to decide: to
    say with numbers why no mesh can be.

    tp takes the largest degree with which the rest works out, dp_shard what the others leave.
    """
    if spec.parallel.tp != "auto":
        return _with_tp(spec, spec.parallel.tp)
    cp = 1 if spec.parallel.cp == "auto" else spec.parallel.cp
    found = [_with_tp(spec, tp) for tp in tensor_degrees(spec, shape, cp, blocks)]
    fits_world = [mesh for mesh in found if mesh.world_size == world_size(spec)]
    fits_batch = [
        m for m in fits_world if spec.train.global_batch_size % sequences_per_pass(spec, m) == 0
    ]
    return (fits_batch or fits_world or found)[0]


def world_size(spec: JobSpec) -> int:
    return spec.cluster.hosts * spec.cluster.gpus_per_host


def sequences_per_pass(spec: JobSpec, mesh: Mesh) -> int:
    """Sequences of one micro batch on every data-parallel rank; `auto` counts as the least, 1."""
    micro = spec.train.micro_batch_size
    return mesh.data_parallel * (1 if micro == "auto" else micro)


def _with_tp(spec: JobSpec, tp: int) -> Mesh:
    wish = spec.parallel
    pp, replicate, cp = (1 if d == "auto" else d for d in (wish.pp, wish.dp_replicate, wish.cp))
    rest = max(1, world_size(spec) // (pp * replicate * cp * tp))
    shard = 1 if wish.dp_shard == "auto" else wish.dp_shard
    if wish.dp_shard == "auto" and wish.data == "fsdp":
        shard = rest
    elif wish.dp_replicate == "auto":
        replicate = max(1, rest // shard)
    return Mesh(pp=pp, dp_replicate=replicate, dp_shard=shard, cp=cp, tp=tp)
