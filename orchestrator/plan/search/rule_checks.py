"""The checks of the rules in `rules.py`. Each returns why a mesh breaks the rule, or None.

A limit must not depend on the mesh (`Broken.limit`). A check returns None if another rule already
refuses the same mistake, so that one mistake gives one line.
"""

from collections.abc import Callable

from orchestrator.contract.mesh import AXES, Mesh
from orchestrator.contract.spec.job_spec import JobSpec
from orchestrator.contract.spec.parallel_spec import PipelineSpec
from orchestrator.contract.spec.pipeline_spec import SPLITS_BACKWARD, demand
from orchestrator.contract.spec.train_spec import BY_OPERATION
from orchestrator.inventory.hosts import grouped
from orchestrator.inventory.profile import blocks_hold
from orchestrator.plan.model.shape import ModelShape
from orchestrator.plan.search.meshes import divisors, sequences_per_pass, world_size
from orchestrator.plan.search.rule import Broken, Case
from orchestrator.plan.stages import can_run

BYTE_TOKENS = 256
SHOWN = 4
"""Hosts that a refusal names."""

# --- the hosts


def too_few_hosts(case: Case) -> Broken | None:
    assert case.hosts.inventory is not None
    there = len(case.hosts.inventory.hosts)
    if there >= case.spec.cluster.hosts:
        return None
    return Broken(f"the inventory has {there}")


def too_few_devices(case: Case) -> Broken | None:
    assert case.hosts.inventory is not None
    hosts, ranks = case.spec.cluster.hosts, case.spec.cluster.gpus_per_host
    if case.hosts.usable >= hosts:
        return None
    few = [host for host in case.hosts.inventory.hosts if host.devices < ranks]
    # The hosts have enough devices but cannot be used: `hosts-usable` names them.
    if not few:
        return None
    shown = ", ".join(f"{host.name} has {host.devices}" for host in few[:SHOWN])
    more = f" and {len(few) - SHOWN} more have too few" if len(few) > SHOWN else ""
    return Broken(
        f"only {case.hosts.usable} of the {hosts} hosts that are needed have that many devices"
        f" ({shown}{more})"
    )


def unusable_hosts(case: Case) -> Broken | None:
    """Enough hosts with enough devices, but some are busy, drained or of another kind."""
    assert case.hosts.inventory is not None
    hosts, ranks = case.spec.cluster.hosts, case.spec.cluster.gpus_per_host
    # With too few hosts in the inventory, `hosts-in-inventory` refuses the job already.
    if case.hosts.usable >= hosts or len(case.hosts.inventory.hosts) < hosts:
        return None
    if any(host.devices < ranks for host in case.hosts.inventory.hosts):
        return None  # `devices-per-host` names these hosts
    left_out = case.hosts.inventory.left_out(ranks)
    reasons = grouped(left_out, SHOWN)
    more = f"; and {len(reasons) - SHOWN} more reasons" if len(reasons) > SHOWN else ""
    return Broken(f"only {case.hosts.usable} can be used ({'; '.join(reasons[:SHOWN])}{more})")


# --- the model


def small_vocabulary(case: Case) -> Broken | None:
    vocabulary = case.shape.vocab_size
    if case.spec.data.tokenizer != "bytes" or vocabulary >= BYTE_TOKENS:
        return None
    return Broken(
        f"needs a vocabulary of {BYTE_TOKENS} or more, the model's vocab_size is {vocabulary}"
    )


def long_sequence(case: Case) -> Broken | None:
    most = case.shape.max_positions
    if case.spec.data.sequence_length <= most:
        return None
    return Broken(
        f"the model's max_position_embeddings is {most}, and a longer sequence needs a model.config"
        " with more"
    )


def sliding_window(case: Case) -> Broken | None:
    """A window at least as long as the sequence is full attention."""
    window = case.shape.window
    # None: the model has no window. 0: its layers differ, which `full-attention` refuses.
    if not window or case.spec.data.sequence_length <= window:
        return None
    return Broken(
        f"the model attends to a window of {window} tokens (sliding_window); the trainer supports"
        " only full attention"
    )


def other_layer_types(case: Case) -> Broken | None:
    if case.shape.window != 0:
        return None
    return Broken(
        "its layer_types are not all full_attention; the trainer supports only full attention"
    )


def dropout_inside_documents(case: Case) -> Broken | None:
    dropout = case.shape.attention_dropout
    if not case.spec.data.masks_documents or not dropout:
        return None
    return Broken(
        f"attention inside documents has no dropout, but the model's config sets {dropout}"
    )


def longest_sequence(shape: ModelShape) -> int:
    """The longest sequence that `sequence-positions` and `sequence-window` both allow; 0 if
    none."""
    return shape.max_positions if shape.window is None else min(shape.max_positions, shape.window)


def linear_names(shape: ModelShape) -> list[str]:
    """Modules that LoRA can adapt."""
    return list(dict.fromkeys(name for name, _, _ in shape.linear))


def unknown_modules(case: Case) -> Broken | None:
    lora = case.spec.model.lora
    if lora is None:
        return None
    known = linear_names(case.shape)
    unknown = [name for name in lora.target_modules if name not in known]
    # An empty list is refused too: no module would be trained.
    if lora.target_modules and not unknown:
        return None
    return Broken(
        f"must be linear layers of {case.shape.model_type} ({', '.join(known)}),"
        f" got {', '.join(unknown) or 'none'}"
    )


# --- tensor parallelism


def distant_group(case: Case) -> Broken | None:
    """A tensor-parallel group communicates in each layer, so it must stay within NVLink."""
    hosts, ranks, tp = case.spec.cluster.hosts, case.spec.cluster.gpus_per_host, case.mesh.tp
    if ranks % tp == 0:
        return None
    inside = f"must divide the {ranks} ranks of a host"
    # No NVLink connects hosts, so a wider group is never allowed, and the message need not explain
    # it.
    if not case.hosts.blocks:
        if ranks == 1:  # the default of a key that is easily forgotten
            inside = "must be 1, as cluster.gpus_per_host is"
        return Broken(f"{inside}, so that no tensor-parallel group spans hosts")
    limit = (
        f"{inside}, or be a multiple of them that takes whole hosts of one NVLink block, at most"
        f" {case.hosts.blocks[0]} hosts x {ranks} devices"
    )
    # A group that takes a part of a host would share the rest of that host with another group.
    if tp % ranks:
        return Broken(limit)
    wide = tp // ranks
    if blocks_hold(case.hosts.blocks, wide, hosts):
        return None
    # A block of 3 hosts has room for one group of 2; its third host stays unused.
    room = sum(size // wide for size in case.hosts.blocks)
    needed = -(-hosts // wide)
    return Broken(
        limit, f"; a group takes {wide} hosts, the blocks have room for {room}, {needed} needed"
    )


def fused_projections(case: Case) -> Broken | None:
    if case.mesh.tp == 1 or not case.shape.fused:
        return None
    model = case.shape.model_type
    return Broken(f"must be 1: the fused projections of {model} cannot be sharded")


def uncompiled_float8(case: Case) -> Broken | None:
    if case.spec.train.float8 is not True or case.spec.train.compile:
        return None
    return Broken(
        "needs train.compile: without it torchao scales values in separate kernels, which is slower"
        " than bfloat16"
    )


def float8_device(case: Case) -> Broken | None:
    assert case.hosts.inventory is not None
    fabric = case.hosts.inventory.fabric(case.hosts.devices)
    if case.spec.train.float8 is not True or fabric is None or "float8" in fabric.profile.flops:
        return None
    return Broken(f"needs devices with float8 arithmetic, and {fabric.profile.name} has none")


def float8_adapters(case: Case) -> Broken | None:
    if case.spec.train.float8 is not True or case.spec.model.lora is None:
        return None
    return Broken("cannot train adapters (model.lora): they are too narrow for float8")


def float8_sides(case: Case) -> Broken | None:
    if case.spec.train.float8 is not True or case.spec.model.lora is not None:
        return None
    uneven = uneven_for_float8(case.shape, case.mesh.tp)
    if not uneven:
        return None
    return Broken(
        "needs linear layers whose sides are multiples of 16 on each tensor-parallel rank",
        f"; with tp={case.mesh.tp} wrong: {', '.join(uneven)}",
    )


FLOAT8_SIDE = 16
"""As in `trainer/model/float8.py`."""


def uneven_for_float8(shape: ModelShape, tp: int) -> list[str]:
    """The linear layers that cannot compute in float8."""
    multiple = FLOAT8_SIDE * tp
    return [
        f"{name} ({into} x {out})"
        for name, into, out in dict.fromkeys(shape.linear)
        if into % multiple or out % multiple
    ]


def divides(what: str, size: Callable[[ModelShape], int]) -> Callable[[Case], Broken | None]:
    def broken(case: Case) -> Broken | None:
        count = size(case.shape)
        return Broken(f"must divide the {count} {what}") if count % case.mesh.tp else None

    return broken


def uneven_tokens(case: Case) -> Broken | None:
    """Sequence parallelism splits the tokens of a cp rank over tp."""
    tokens, left = divmod(case.spec.data.sequence_length, case.mesh.cp)
    if left or tokens % case.mesh.tp == 0:
        return None  # if cp does not divide the sequence, `cp-sequence` refuses it
    what = "a sequence" if case.mesh.cp == 1 else "a cp rank's part of a sequence"
    return Broken(f"must divide the {tokens} tokens of {what}")


# --- context parallelism


def context_parts(spec: JobSpec, cp: int) -> int:
    """Equal parts of a sequence. Ring and all-gather give each rank an early and a late part, so
    that causal attention costs all ranks the same."""
    return cp * (1 if spec.parallel.context == "ulysses" else 2)


def uneven_sequence(case: Case) -> Broken | None:
    length, parts = case.spec.data.sequence_length, context_parts(case.spec, case.mesh.cp)
    # A single cp rank has the whole sequence, so no parts are needed.
    if case.mesh.cp == 1 or length % parts == 0:
        return None
    method = case.spec.parallel.context
    many = "cp" if method == "ulysses" else "2 x cp"
    return Broken(
        f"{method} splits the {length} tokens of a sequence into {many} equal parts",
        f" (here {parts}), and {parts} does not divide {length}",
    )


def uneven_heads(case: Case) -> Broken | None:
    """Ulysses gives each cp rank some of a tp rank's heads. It copies kv heads if there are fewer
    than ranks."""
    shape, tp, cp = case.shape, case.mesh.tp, case.mesh.cp
    if cp == 1 or case.spec.parallel.context != "ulysses" or shape.num_heads % tp:
        return None  # if tp does not divide the heads, `tp-heads` refuses it
    heads, kv_heads = shape.num_heads // tp, max(1, shape.num_kv_heads // tp)
    if heads % cp == 0 and (kv_heads % cp == 0 or cp % kv_heads == 0):
        return None
    return Broken(
        "ulysses needs cp to divide the heads of a tp rank, and to divide or be a multiple of its"
        " kv heads",
        f": {heads} heads, {kv_heads} kv heads",
    )


def attention_dropout(case: Case) -> Broken | None:
    dropout = case.shape.attention_dropout
    if case.mesh.cp == 1 or not dropout:
        return None
    return Broken(
        f"must be 1: blockwise attention has no dropout, but the model's config sets {dropout}"
    )


# --- sharding, pipeline and batch


def uneven_reshard(case: Case) -> Broken | None:
    wanted, group = case.spec.parallel.fsdp.reshard, case.mesh.dp_shard * case.mesh.cp
    if case.spec.parallel.data != "fsdp" or isinstance(wanted, bool) or group % wanted == 0:
        return None
    return Broken(f"reshard_after_forward={wanted} must divide dp_shard x cp", f" = {group} ranks")


def few_layers(case: Case) -> Broken | None:
    layers, stages = case.shape.num_layers, case.mesh.pp * case.pipeline.stages
    # Without a pipeline there are no stages.
    if case.mesh.pp == 1 or layers >= stages:
        return None
    per_rank = (
        f" = {case.mesh.pp} x {case.pipeline.stages} a rank" if case.pipeline.stages > 1 else ""
    )
    return Broken(
        f"each stage needs a layer, the model has {layers}", f" for {stages} stages{per_rank}"
    )


def splits_backward(pp: int, pipeline: PipelineSpec) -> bool:
    """The schedule computes gradients of inputs first and those of weights later."""
    return pp > 1 and pipeline.schedule == SPLITS_BACKWARD


def split_selective(case: Case) -> Broken | None:
    kind = case.spec.train.activation_checkpointing
    if kind not in BY_OPERATION or not splits_backward(case.mesh.pp, case.pipeline):
        return None
    return Broken(
        f"{SPLITS_BACKWARD} runs two backward passes per layer, but {kind} recomputation"
        " supports only one"
    )


def split_compiled(case: Case) -> Broken | None:
    train = case.spec.train
    # float8 needs compiled layers too.
    compiled = train.compile is True or train.float8 is True
    if not compiled or not splits_backward(case.mesh.pp, case.pipeline):
        return None
    return Broken(
        f"{SPLITS_BACKWARD} splits the backward pass in two, but torch cannot split that of a"
        " compiled layer"
    )


def fills_world(spec: JobSpec) -> bool:
    """dp_shard takes every rank that the other degrees leave."""
    return spec.parallel.dp_shard == "auto" and spec.parallel.data == "fsdp"


def other_world(case: Case) -> Broken | None:
    spec, world = case.spec, world_size(case.spec)
    if case.mesh.world_size == world:
        return None
    made = f"{case.mesh.world_size}"
    # dp_shard is a placeholder here, so its number would mean nothing to the user.
    if fills_world(spec):
        made = f"a multiple of {case.mesh.world_size // case.mesh.dp_shard}"
    degrees = " x ".join(f"{axis}={_degree(spec, axis, case.mesh)}" for axis in AXES)
    hosts, ranks = spec.cluster.hosts, spec.cluster.gpus_per_host
    many = f"{hosts} host{'s' if hosts > 1 else ''} x {ranks}"
    return Broken(
        f"degrees must multiply to the {world} ranks of {many}", f"; {degrees} multiply to {made}"
    )


def _degree(spec: JobSpec, axis: str, mesh: Mesh) -> str:
    if getattr(spec.parallel, axis) != "auto":
        return str(getattr(mesh, axis))
    return "auto" if axis == "dp_shard" and fills_world(spec) else f"{getattr(mesh, axis)} (auto)"


def uneven_batch(case: Case) -> Broken | None:
    spec, batch = case.spec, case.spec.train.global_batch_size
    per_pass = sequences_per_pass(spec, case.mesh)
    if batch % per_pass == 0 or _data_parallel_unknown(spec, case.mesh):
        return None
    by = _by_micro_batch(spec)
    return Broken(
        f"the data-parallel ranks{by} must divide the global batch of {batch}",
        f"; {case.mesh.data_parallel} data-parallel ranks{by} = {per_pass}",
    )


def unusable_micro_batches(case: Case) -> Broken | None:
    """No micro batch size makes a number of micro batches that the schedule can run."""
    spec = case.spec
    # Any number of micro batches can run without a pipeline.
    if case.mesh.pp == 1 or _data_parallel_unknown(spec, case.mesh):
        return None
    batch, micro = spec.train.global_batch_size, spec.train.micro_batch_size
    most, left = divmod(batch, sequences_per_pass(spec, case.mesh))
    if left:
        return None  # `batch-ranks` refuses it
    # The largest count first: most schedules need a minimum, so it is the likeliest to pass.
    counts = reversed(divisors(most)) if micro == "auto" else (most,)
    if any(can_run(case.pipeline, case.mesh.pp, count) for count in counts):
        return None
    ranks = f"{case.mesh.data_parallel} data-parallel ranks{_by_micro_batch(spec)}"
    return Broken(
        f"{case.pipeline.schedule} cannot run the micro batches of a global batch of {batch}",
        f"; it needs {demand(case.pipeline, case.mesh.pp, most)}, {ranks} make {most}",
    )


def _by_micro_batch(spec: JobSpec) -> str:
    micro = spec.train.micro_batch_size
    return "" if micro == "auto" else f" x micro batch {micro}"


def _data_parallel_unknown(spec: JobSpec, mesh: Mesh) -> bool:
    """`world-size` refuses the mesh, so its dp_shard (`auto`) is only a placeholder."""
    return mesh.world_size != world_size(spec) and fills_world(spec)
