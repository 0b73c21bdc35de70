"""Which degrees a spec means; whether they can be is for `refusals`."""

import math

from orchestrator.contract.mesh import Mesh
from orchestrator.contract.spec import JobSpec
from orchestrator.plan.model.shape import ModelShape


def divisors(number: int) -> list[int]:
    """From 1 up."""
    small = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def tensor_split(spec: JobSpec, shape: ModelShape) -> dict[str, int]:
    """What tensor and sequence parallelism split, each into equal parts."""
    cp = spec.parallel.cp
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


def tensor_degrees(spec: JobSpec, shape: ModelShape) -> list[int]:
    """Every tp that stays inside a host and divides what it splits; the largest first."""
    if spec.train.compile or shape.fused:
        return [1]  # see `refusals`
    parts = tensor_split(spec, shape).values()
    return [
        t
        for t in reversed(divisors(spec.cluster.gpus_per_host))
        if all(part % t == 0 for part in parts) and _leaves_heads(spec, shape, t)
    ]


def _leaves_heads(spec: JobSpec, shape: ModelShape, tp: int) -> bool:
    wish = spec.parallel
    ulysses = wish.cp > 1 and wish.context == "ulysses"
    return tp == 1 or not ulysses or not ulysses_refusals(shape, tp, wish.cp)


def choose_mesh(spec: JobSpec, shape: ModelShape) -> Mesh:
    """The degrees of `spec` with each `auto` decided; may be refused, see `refusals`.

    tp takes the largest degree with which the rest works out, dp_shard what the others leave.
    """
    if spec.parallel.tp != "auto":
        return _with_tp(spec, spec.parallel.tp)
    meshes = [_with_tp(spec, tp) for tp in tensor_degrees(spec, shape)]
    fits_world = [mesh for mesh in meshes if mesh.world_size == world_size(spec)]
    fits_batch = [
        m for m in fits_world if spec.train.global_batch_size % sequences_per_pass(spec, m) == 0
    ]
    return (fits_batch or fits_world or meshes)[0]


def world_size(spec: JobSpec) -> int:
    return spec.cluster.hosts * spec.cluster.gpus_per_host


def sequences_per_pass(spec: JobSpec, mesh: Mesh) -> int:
    """Sequences of one micro batch on every data-parallel rank; `auto` counts as the least, 1."""
    micro = spec.train.micro_batch_size
    return mesh.data_parallel * (1 if micro == "auto" else micro)


def _with_tp(spec: JobSpec, tp: int) -> Mesh:
    wish = spec.parallel
    if wish.dp_shard != "auto":
        shard = wish.dp_shard
    elif wish.data != "fsdp":
        shard = 1
    else:
        shard = max(1, world_size(spec) // (wish.pp * wish.dp_replicate * wish.cp * tp))
    return Mesh(pp=wish.pp, dp_replicate=wish.dp_replicate, dp_shard=shard, cp=wish.cp, tp=tp)
