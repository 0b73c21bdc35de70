"""Which degrees a spec means, and why they cannot be where they cannot."""

from collections.abc import Iterator

from orchestrator.cluster.inventory import Inventory
from orchestrator.contract.mesh import AXES, Mesh
from orchestrator.contract.spec import JobSpec
from orchestrator.plan.shape import ModelShape

BYTE_TOKENS = 256
NOT_RUN_YET = {"pp": "pipeline", "cp": "context"}


def divisors(number: int) -> list[int]:
    """From 1 up."""
    small = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def tensor_split(spec: JobSpec, shape: ModelShape) -> dict[str, int]:
    """What tensor and sequence parallelism split, each into equal parts."""
    return {
        "heads": shape.num_heads,
        "kv heads": shape.num_kv_heads,
        "vocabulary entries": shape.vocab_size,
        "intermediate columns": shape.intermediate_size,
        "tokens of a sequence": spec.data.sequence_length,
    }


def tensor_degrees(spec: JobSpec, shape: ModelShape) -> list[int]:
    """Every tp that stays inside a host and divides what it splits; the largest first."""
    if spec.train.compile:
        return [1]  # see `_of_axes`
    parts = tensor_split(spec, shape).values()
    return [
        t
        for t in reversed(divisors(spec.cluster.gpus_per_host))
        if all(part % t == 0 for part in parts)
    ]


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
    others = wish.pp * wish.dp_replicate * wish.cp * tp
    shard = max(1, world_size(spec) // others) if wish.dp_shard == "auto" else wish.dp_shard
    return Mesh(pp=wish.pp, dp_replicate=wish.dp_replicate, dp_shard=shard, cp=wish.cp, tp=tp)


def refusals(spec: JobSpec, inventory: Inventory, shape: ModelShape, mesh: Mesh) -> tuple[str, ...]:
    """Every reason why `mesh` cannot be; none means that it can."""
    return (
        *_of_hosts(spec, inventory),
        *_of_model(spec, shape),
        *_of_axes(spec, shape, mesh),
        *_of_product(spec, mesh),
    )


def _of_hosts(spec: JobSpec, inventory: Inventory) -> Iterator[str]:
    hosts, ranks = spec.cluster.hosts, spec.cluster.gpus_per_host
    able = len(inventory.with_devices(ranks))
    if able >= hosts:
        return
    if len(inventory.hosts) < hosts:
        yield f"cluster.hosts={hosts}: the inventory has {len(inventory.hosts)}"
    few = [host for host in inventory.hosts if host.devices < ranks]
    if few:
        shown = ", ".join(f"{host.name} has {host.devices}" for host in few[:4])
        more = f" and {len(few) - 4} more have too few" if len(few) > 4 else ""
        yield (
            f"cluster.gpus_per_host={ranks}: only {able} of the {hosts} hosts that are needed"
            f" have so many devices ({shown}{more})"
        )


def _of_model(spec: JobSpec, shape: ModelShape) -> Iterator[str]:
    if spec.data.tokenizer == "bytes" and shape.vocab_size < BYTE_TOKENS:
        yield (
            f"data.tokenizer=bytes: needs a vocabulary of {BYTE_TOKENS} or more,"
            f" the model's vocab_size is {shape.vocab_size}"
        )
    if spec.data.sequence_length > shape.max_positions:
        yield (
            f"data.sequence_length={spec.data.sequence_length}: the model's"
            f" max_position_embeddings is {shape.max_positions}"
        )


def _of_axes(spec: JobSpec, shape: ModelShape, mesh: Mesh) -> Iterator[str]:
    for axis, words in NOT_RUN_YET.items():
        degree = getattr(mesh, axis)
        if degree > 1:
            yield f"parallel.{axis}={degree}: the bundled trainer runs no {words} parallelism yet"
    ranks = spec.cluster.gpus_per_host
    if ranks % mesh.tp:
        yield (
            f"parallel.tp={mesh.tp}: must divide the {ranks} ranks of a host,"
            " or a tensor-parallel group would span hosts"
        )
    uneven = [
        f"{size} {what}" for what, size in tensor_split(spec, shape).items() if size % mesh.tp
    ]
    if uneven:
        yield f"parallel.tp={mesh.tp}: must divide {', '.join(uneven)}"
    if spec.train.compile and mesh.tp > 1:
        yield (
            f"train.compile=true: not with parallel.tp={mesh.tp}, for torch 2.13 then computes"
            " wrong gradients; set train.compile=false or parallel.tp=1"
        )


def _of_product(spec: JobSpec, mesh: Mesh) -> Iterator[str]:
    """The degrees must fill the world, and the batch must divide by what they read at once."""
    world = world_size(spec)
    if mesh.world_size != world:
        degrees = [f"{axis}={_wish(spec, axis, mesh)}" for axis in AXES]
        yield (
            f"parallel: {' x '.join(degrees)} {_multiplied(spec, mesh)}, not to the {world} ranks"
            f" of {spec.cluster.hosts} hosts x {spec.cluster.gpus_per_host}"
        )
        if spec.parallel.dp_shard == "auto":
            return
    per_pass = sequences_per_pass(spec, mesh)
    if spec.train.global_batch_size % per_pass:
        micro = spec.train.micro_batch_size
        by = f" x micro batch {micro}" if micro != "auto" else ""
        yield (
            f"train.global_batch_size={spec.train.global_batch_size}: must be a multiple of"
            f" {mesh.data_parallel} data-parallel ranks{by} = {per_pass}"
        )


def _wish(spec: JobSpec, axis: str, mesh: Mesh) -> str:
    if getattr(spec.parallel, axis) != "auto":
        return str(getattr(mesh, axis))
    return "auto" if axis == "dp_shard" else f"{getattr(mesh, axis)} (auto)"


def _multiplied(spec: JobSpec, mesh: Mesh) -> str:
    if spec.parallel.dp_shard == "auto":
        others = mesh.world_size // mesh.dp_shard
        return f"multiply to a multiple of {others}"
    return f"multiply to {mesh.world_size}"
