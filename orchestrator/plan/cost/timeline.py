"""The seconds of one optimizer step, by part, on the slowest rank."""

import math
from typing import NamedTuple

from orchestrator.contract.spec.pipeline_spec import SPLITS_BACKWARD
from orchestrator.plan.cost.collective import Flow
from orchestrator.plan.cost.dp_traffic import Windows, data_traffic, hidden_along_pp
from orchestrator.plan.cost.layers import Slice
from orchestrator.plan.cost.machine import Machine
from orchestrator.plan.cost.passes import MicroBatch, PassOptions, Stage, micro_batch
from orchestrator.plan.cost.tp_cp_traffic import outer_traffic
from orchestrator.plan.cost.units import Units, units_of
from orchestrator.plan.model.shape import ModelShape
from orchestrator.plan.setup import Setup, every
from orchestrator.plan.sizes import COMPUTE_BYTES, FLOAT32_BYTES, NF4_BYTES
from orchestrator.plan.stages import layers_along_pp, most_sends

OPTIMIZER_BYTES = {"adamw": 28, "adam": 28, "nadam": 60, "radam": 60, "adafactor": 60, "sgd": 28}
"""Bytes read and written per parameter. Fused Adam reads four float32 values and writes three; the
others run several operations."""
ROUNDING_BYTES = 24
"""Bytes per parameter to make two narrow moments float32, and to round them again."""
CLIP_BYTES = 12
"""Bytes per parameter to compute the gradient norm and to scale the gradients."""
TOTALS_BYTES = 128
"""Size of the all-reduce of a step's totals before the update (`trainer/step.py`)."""


class Timeline(NamedTuple):
    parts: dict[str, float]
    flows: list[Flow]


def timeline(setup: Setup, machine: Machine) -> Timeline:
    """Of the rank along pp that needs longest, with its data-parallel traffic: the one whose passes
    take longest may have fewer weights than another."""
    part = slice_of(setup)
    batch = micro_batch(machine, setup.shape, part, _options(setup))
    sends = _pipeline_sends(setup, machine, part)
    found = _on_stage(setup, machine, batch, batch.slowest, sends)
    if setup.mesh.pp == 1:
        return found
    most = _units(setup, batch.slowest).gathered
    for stage, _ in batch.stages:
        # A stage with shorter passes and no more weights is not slower.
        if _units(setup, stage).gathered > most:
            other = _on_stage(setup, machine, batch, stage, sends)
            found = max(found, other, key=lambda one: sum(one.parts.values()))
    return found


def _units(setup: Setup, stage: Stage) -> Units:
    return units_of(setup.shape, setup.mesh.tp, stage.rank, _sizes(setup), setup.lora)


def _on_stage(
    setup: Setup, machine: Machine, batch: MicroBatch, stage: Stage, sends: tuple[float, list[Flow]]
) -> Timeline:
    micro, part = setup.micro_batches, slice_of(setup)
    units, windows = _units(setup, stage), _windows(setup, machine, batch, stage)
    data = data_traffic(setup, machine, stage.rank, units, windows)
    sends_s, pipe_flows = sends
    tied = _tied(setup, machine)
    parts = {
        "compute": micro * stage.compute,
        "recompute": micro * stage.recompute,
        "communication": micro * (stage.traffic + sends_s)
        + data.exposed
        + sum(flow.exposed for flow in tied),
        "contention": data.contention,
        "copies": data.copied / machine.memory_bytes_per_s,
        "host": micro * stage.host,
        "bubble": _bubble(setup, batch, stage, sends_s),
        "optimizer": _optimizer(setup, machine, units),
        "stragglers": _stragglers(setup, machine, micro * (stage.compute + stage.recompute)),
    }
    flows = [*data.flows, *pipe_flows, *tied, *_axis_flows(setup, machine, part, stage)]
    return Timeline({name: seconds for name, seconds in parts.items() if seconds > 0}, flows)


def passes_s(setup: Setup, machine: Machine) -> float:
    """The seconds of a step that do not depend on the data-parallel axes: all passes with tp, cp
    and pp traffic, the bubble, and the wait for slow ranks."""
    part, micro = slice_of(setup), setup.micro_batches
    batch = micro_batch(machine, setup.shape, part, _options(setup))
    sends_s, _ = _pipeline_sends(setup, machine, part)
    stage = batch.slowest
    waits_s = _stragglers(setup, machine, micro * (stage.compute + stage.recompute))
    return micro * (stage.seconds + sends_s) + _bubble(setup, batch, stage, sends_s) + waits_s


def slice_of(setup: Setup) -> Slice:
    return Slice(
        sequences=setup.micro_batch_size,
        tokens=setup.tokens,
        document=setup.document_tokens,
        tp=setup.mesh.tp,
        cp=setup.mesh.cp,
        context=setup.context,
        dtype=setup.dtype,
        compiled=setup.compile,
        float8=setup.float8,
        lora=setup.lora,
        repeats_last=setup.compile and setup.mesh.tp > 1 and not setup.compiles_recomputation,
    )


def _options(setup: Setup) -> PassOptions:
    return PassOptions(
        checkpointing=setup.checkpointing,
        every=every(setup),
        pp=setup.mesh.pp,
        pipeline=setup.pipeline,
        even_stages=setup.even_stages,
        sharded=setup.data == "fsdp",
        loss_chunks=0 if setup.loss_chunks == "auto" else setup.loss_chunks,
    )


def _sizes(setup: Setup) -> tuple[float, int, int]:
    """Bytes per gathered weight of a layer, per other gathered weight, and per reduced gradient."""
    size, reduce_size = COMPUTE_BYTES[setup.dtype], COMPUTE_BYTES[setup.reduce_dtype]
    layer: float = size
    if setup.lora is not None and setup.lora.quantize == "nf4":
        layer = NF4_BYTES
    elif setup.float8 and isinstance(setup.reshard, bool) and not setup.cpu_offload:
        layer = COMPUTE_BYTES["float8"]
    return layer, size, reduce_size


def _windows(setup: Setup, machine: Machine, batch: MicroBatch, stage: Stage) -> Windows:
    """Seconds that data-parallel collectives can overlap with: the computation of layers, tp
    traffic on other links, and the time that the device waits for the host."""
    mesh, window = setup.mesh, batch.window
    host_wait = stage.host / stage.rank.layers
    # The backward pass has twice the operations of the forward pass.
    forward, backward = host_wait / 3, host_wait * 2 / 3
    if mesh.tp > 1 and machine.wire(mesh.dp_shard * mesh.cp, mesh.tp).group.level != "host":
        forward, backward = forward + batch.tp_exposed[0], backward + batch.tp_exposed[1]
    return Windows(
        forward=window.forward + forward, backward=window.backward + backward, head=window.head
    )


def _pipeline_sends(setup: Setup, machine: Machine, part: Slice) -> tuple[float, list[Flow]]:
    """Seconds per micro batch to send hidden states to the next stage and gradients to the previous
    one, as far as nothing hides them. torch's schedules wait for these sends."""
    mesh, micro = setup.mesh, setup.micro_batches
    if mesh.pp == 1:
        return 0.0, []
    wire = machine.wire(mesh.pp, mesh.world_size // mesh.pp)
    size = stage_output_bytes(setup.shape, part)
    # A rank waits for its receives like for its sends, also at the ends of the pipeline.
    each = 2 * setup.pipeline.stages * wire.send_s(size)
    shown = each * (1 - hidden_along_pp(setup.pipeline, machine))
    sends = micro * most_sends(setup.pipeline, mesh.pp)
    where = ("pp", "send", "activations")
    return shown, [Flow(*where, sends * size, sends, wire.group, micro * each, micro * shown)]


def _tied(setup: Setup, machine: Machine) -> list[Flow]:
    """Before the update, the first and the last stage exchange the gradients of tied embeddings, if
    they are on different ranks (`trainer/parallel/tied.py`). All ranks wait for this."""
    mesh, shape = setup.mesh, setup.shape
    even = setup.even_stages
    first = layers_along_pp(shape, mesh.pp, setup.pipeline, setup.tokens, even)[0]
    if not shape.tied_embeddings or first.is_last or setup.lora is not None:
        return []
    copies = {
        "fsdp": mesh.dp_shard * mesh.cp,
        "zero1": mesh.dp_replicate * mesh.cp,
        "ddp": 1,
    }[setup.data]
    size = math.ceil(shape.vocabulary_parameters / mesh.tp) / copies * FLOAT32_BYTES
    wire = machine.wire(2, (mesh.pp - 1) * mesh.world_size // mesh.pp)
    seconds = wire.send_s(size)
    return [Flow("pp", "exchange", "tied gradients", size, 1, wire.group, seconds, seconds)]


def stage_output_bytes(shape: ModelShape, part: Slice) -> float:
    """Bytes of the hidden states that a rank sends to the next stage."""
    return part.rows * shape.hidden_size / part.tp * COMPUTE_BYTES[part.dtype]


def _bubble(setup: Setup, batch: MicroBatch, stage: Stage, sends_s: float) -> float:
    """Idle seconds while the first micro batch reaches the last stage and the last one returns.

    This is the time of all other ranks for one micro batch: a share (pp - 1) / (m + pp - 1) of the
    step with equal ranks, and 1/v of that with v stages per rank (Narayanan et al. 2021, section
    2.2).
    """
    pp, spec = setup.mesh.pp, setup.pipeline
    if pp == 1:
        return 0.0
    if spec.schedule == SPLITS_BACKWARD:
        # F + B - 2 W: the gaps that weight gradients do not fill (Qi et al. 2023, table 1). A stage
        # is half of a rank's layers.
        rest = stage.seconds - 3 * stage.weights
        return (pp - 1) * (max(0.0, rest) + sends_s) / spec.stages
    others = sum(one.seconds * count for one, count in batch.stages) - stage.seconds
    return (others + (pp - 1) * sends_s) / spec.stages


def _optimizer(setup: Setup, machine: Machine, units: Units) -> float:
    """Seconds of the update, and of the all-reduce of totals before it."""
    mesh = setup.mesh
    shards = {"fsdp": mesh.dp_shard, "zero1": mesh.dp_replicate, "ddp": 1}[setup.data]
    own = units.trained / (shards if setup.data == "ddp" else shards * mesh.cp)
    rate = machine.calibration.host_memory if setup.cpu_offload else machine.memory_bytes_per_s
    rounding = ROUNDING_BYTES if setup.state_dtype != "float32" else 0
    update = own * (OPTIMIZER_BYTES[setup.optimizer] + CLIP_BYTES + rounding) / rate
    return update + machine.wire(mesh.world_size, 1).all_reduce_s(TOTALS_BYTES)


def _stragglers(setup: Setup, machine: Machine, computing_s: float) -> float:
    """Seconds that ranks wait for the slowest one. Devices of one kind differ in speed. The slowest
    of n is sqrt(2 ln n) standard deviations below the mean, if their speeds are normally
    distributed (Cramér 1946, section 28.6)."""
    hosts = max(1.0, setup.mesh.world_size / machine.fabric.devices_per_host)
    return computing_s * machine.calibration.spread * math.sqrt(2 * math.log(hosts))


def _axis_flows(setup: Setup, machine: Machine, part: Slice, stage: Stage) -> list[Flow]:
    micro, rank = setup.micro_batches, stage.rank
    ends = rank.is_first + rank.is_last
    outer = outer_traffic(machine, setup.shape, part)
    flows = []
    for traffic, times in stage.axes:
        sent, calls, seconds, exposed = times.sent, times.calls, times.seconds, times.exposed
        if traffic.axis == "tp":
            # Embedding and head each add one all-gather and one reduce-scatter per micro batch.
            sent += ends * outer.sent
            calls += ends * outer.calls
            seconds += ends * outer.seconds
            exposed += ends * outer.exposed
        what = (traffic.axis, traffic.collective, traffic.what)
        group = traffic.group
        flows.append(
            Flow(*what, micro * sent, micro * calls, group, micro * seconds, micro * exposed)
        )
    return flows
