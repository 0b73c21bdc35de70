"""Why a mesh cannot be, all reasons at once.

What the trainer refuses as its ranks start is refused here first, before a job is queued; what only
a look at tokenizers, weights or GPUs can tell is left to the trainer.
"""

from collections.abc import Iterator

from orchestrator.contract.mesh import AXES, Mesh
from orchestrator.contract.spec.job_spec import JobSpec
from orchestrator.contract.spec.pipeline_spec import SPLITS_BACKWARD, demand
from orchestrator.inventory.hosts import Inventory
from orchestrator.plan.model.shape import ModelShape
from orchestrator.plan.search.constraints import context_parts
from orchestrator.plan.search.degrees import (
    divisors,
    sequences_per_pass,
    stays_near,
    tensor_split,
    ulysses_refusals,
    world_size,
)
from orchestrator.plan.stages import takes

BYTE_TOKENS = 256


def refusals(spec: JobSpec, inventory: Inventory, shape: ModelShape, mesh: Mesh) -> tuple[str, ...]:
    """Every reason why `mesh` cannot be; none means that it can."""
    return (
        *_of_hosts(spec, inventory),
        *_of_model(spec, shape),
        *_of_adapters(spec, shape),
        *_of_stages(spec, shape, mesh),
        *_of_context(spec, shape, mesh),
        *_of_tensors(spec, inventory, shape, mesh),
        *_of_sharding(spec, mesh),
        *_of_product(spec, mesh),
        *_of_batch(spec, mesh),
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
    elif len(inventory.hosts) >= hosts:
        left_out = inventory.left_out(ranks)
        shown = "; ".join(f"{name} {why}" for name, why in list(left_out.items())[:4])
        more = f"; and {len(left_out) - 4} more" if len(left_out) > 4 else ""
        yield f"cluster.hosts={hosts}: only {able} can be used ({shown}{more})"


def _of_model(spec: JobSpec, shape: ModelShape) -> Iterator[str]:
    length = spec.data.sequence_length
    if spec.data.tokenizer == "bytes" and shape.vocab_size < BYTE_TOKENS:
        yield (
            f"data.tokenizer=bytes: needs a vocabulary of {BYTE_TOKENS} or more,"
            f" the model's vocab_size is {shape.vocab_size}"
        )
    if length > shape.max_positions:
        yield (
            f"data.sequence_length={length}: the model's"
            f" max_position_embeddings is {shape.max_positions}"
        )
    if shape.window == 0:
        yield "model: its layer_types are not all full_attention, which alone is done"
    elif shape.window is not None and length > shape.window:
        yield (
            f"data.sequence_length={length}: the model attends to a window of {shape.window}"
            " tokens (sliding_window), and only full attention is done"
        )


def _of_adapters(spec: JobSpec, shape: ModelShape) -> Iterator[str]:
    if spec.model.lora is None:
        return
    known = list(dict.fromkeys(name for name, _, _ in shape.linear))
    absent = [name for name in spec.model.lora.target_modules if name not in known]
    if absent or not spec.model.lora.target_modules:
        yield (
            f"model.lora.target_modules: must be linear layers of {shape.model_type}"
            f" ({', '.join(known)}), got {', '.join(absent) or 'none'}"
        )


def _of_stages(spec: JobSpec, shape: ModelShape, mesh: Mesh) -> Iterator[str]:
    pipeline = spec.parallel.pipeline
    stages = mesh.pp * pipeline.stages
    if mesh.pp > 1 and shape.num_layers < stages:
        per_rank = f" x {pipeline.stages} stages a rank" if pipeline.stages > 1 else ""
        yield (
            f"parallel.pp={mesh.pp}{per_rank}: needs {stages} layers or more for as many stages,"
            f" the model has {shape.num_layers}"
        )
    if mesh.pp > 1 and pipeline.schedule == SPLITS_BACKWARD:
        yield from _of_split_backward(spec)


def _of_split_backward(spec: JobSpec) -> Iterator[str]:
    """A schedule that goes back for the inputs first, and for the weights later."""
    schedule = f"parallel.pipeline.schedule={SPLITS_BACKWARD}"
    if spec.train.activation_checkpointing == "selective":
        yield (
            f"train.activation_checkpointing=selective: not with {schedule}, which goes backward"
            " twice, and torch recomputes selectively for one backward pass alone"
        )
    if spec.train.compile:
        yield (
            f"train.compile=true: not with {schedule}, for torch does not split the backward pass"
            " of a compiled layer in two"
        )


def _of_context(spec: JobSpec, shape: ModelShape, mesh: Mesh) -> Iterator[str]:
    method, length = spec.parallel.context, spec.data.sequence_length
    if mesh.cp == 1:
        return
    parts = context_parts(spec, mesh.cp)
    if length % parts:
        yield (
            f"parallel.cp={mesh.cp}: {method} cuts the {length} tokens of a sequence into {parts}"
            " equal parts, and they do not divide"
        )
    if method == "ulysses" and shape.num_heads % mesh.tp == 0:
        for must in ulysses_refusals(shape, mesh.tp, mesh.cp):
            yield f"parallel.cp={mesh.cp}: for ulysses it must {must}"
    if shape.attention_dropout:
        yield (
            f"parallel.cp={mesh.cp}: attention is done in blocks then, without the dropout of"
            f" {shape.attention_dropout} that the model's config asks for"
        )


def _of_tensors(
    spec: JobSpec, inventory: Inventory, shape: ModelShape, mesh: Mesh
) -> Iterator[str]:
    if spec.cluster.gpus_per_host % mesh.tp:
        yield from _of_wide_groups(spec, inventory, mesh.tp)
    if mesh.tp > 1 and shape.fused:
        yield (
            f"parallel.tp={mesh.tp}: the projections of {shape.model_type} are fused and cannot be"
            " cut"
        )
        return
    split = tensor_split(spec, shape, mesh.cp).items()
    uneven = [f"{size} {what}" for what, size in split if size % mesh.tp]
    if uneven:
        yield f"parallel.tp={mesh.tp}: must divide {', '.join(uneven)}"
    if spec.train.compile and mesh.tp > 1:
        yield (
            f"train.compile=true: not with parallel.tp={mesh.tp}, for torch 2.13 then computes"
            " wrong gradients; set train.compile=false or parallel.tp=1"
        )


def _of_wide_groups(spec: JobSpec, inventory: Inventory, tp: int) -> Iterator[str]:
    """Groups that no host holds: whole hosts of one NVLink block do."""
    hosts, ranks = spec.cluster.hosts, spec.cluster.gpus_per_host
    blocks = inventory.blocks(ranks)
    if not blocks:
        yield (
            f"parallel.tp={tp}: must divide the {ranks} ranks of a host,"
            " or a tensor-parallel group would span hosts"
        )
    elif tp % ranks:
        yield f"parallel.tp={tp}: must divide the {ranks} ranks of a host, or be a multiple of them"
    elif not stays_near(spec, blocks, tp):
        wide = tp // ranks
        room = sum(size // wide for size in blocks)
        yield (
            f"parallel.tp={tp}: a group takes {wide} hosts of one NVLink block; the blocks have"
            f" {blocks[0]} free hosts or fewer, with room for {room} such groups, and"
            f" {-(-hosts // wide)} are needed"
        )


def _of_sharding(spec: JobSpec, mesh: Mesh) -> Iterator[str]:
    wanted = spec.parallel.fsdp.reshard
    group = mesh.dp_shard * mesh.cp
    if spec.parallel.data == "fsdp" and not isinstance(wanted, bool) and group % wanted:
        cp = f" x cp={mesh.cp}" if mesh.cp > 1 else ""
        yield (
            f"parallel.fsdp.reshard_after_forward={wanted}: must divide the {group} ranks of"
            f" dp_shard={mesh.dp_shard}{cp}, or be true or false"
        )


def _of_product(spec: JobSpec, mesh: Mesh) -> Iterator[str]:
    """The degrees must fill the world."""
    world = world_size(spec)
    if mesh.world_size != world:
        degrees = [f"{axis}={_wish(spec, axis, mesh)}" for axis in AXES]
        yield (
            f"parallel: {' x '.join(degrees)} {_multiplied(spec, mesh)}, not to the {world} ranks"
            f" of {spec.cluster.hosts} hosts x {spec.cluster.gpus_per_host}"
        )


def _of_batch(spec: JobSpec, mesh: Mesh) -> Iterator[str]:
    """The batch must divide by what is read at once, and fill a pipeline's schedule."""
    if mesh.world_size != world_size(spec) and fills(spec):
        return  # The number of data-parallel ranks is not known.
    train = spec.train
    batch, micro = train.global_batch_size, train.micro_batch_size
    per_pass = sequences_per_pass(spec, mesh)
    by = f" x micro batch {micro}" if micro != "auto" else ""
    if batch % per_pass:
        yield (
            f"train.global_batch_size={batch}: must be a multiple of"
            f" {mesh.data_parallel} data-parallel ranks{by} = {per_pass}"
        )
        return
    passes, pipeline = batch // per_pass, spec.parallel.pipeline
    able = takes(pipeline, mesh.pp, passes)
    if not able and micro == "auto":
        able = any(takes(pipeline, mesh.pp, count) for count in divisors(passes))
    if not able:
        yield (
            f"parallel.pp={mesh.pp}: {pipeline.schedule} needs micro batches a step to be"
            f" {demand(pipeline, mesh.pp, passes)}; train.global_batch_size={batch} on"
            f" {mesh.data_parallel} data-parallel ranks{by} makes {passes}"
        )


def fills(spec: JobSpec) -> bool:
    """dp_shard is as large as makes the degrees fill the world."""
    return spec.parallel.dp_shard == "auto" and spec.parallel.data == "fsdp"


def _wish(spec: JobSpec, axis: str, mesh: Mesh) -> str:
    if getattr(spec.parallel, axis) == getattr(mesh, axis):
        return str(getattr(mesh, axis))
    return "auto" if axis == "dp_shard" and fills(spec) else f"{getattr(mesh, axis)} (auto)"


def _multiplied(spec: JobSpec, mesh: Mesh) -> str:
    if fills(spec):
        others = mesh.world_size // mesh.dp_shard
        return f"multiply to a multiple of {others}"
    return f"multiply to {mesh.world_size}"
