"""One optimizer step on the rank that holds up the others: where its seconds go."""

import math
from typing import NamedTuple

from orchestrator.contract.spec.pipeline_spec import SPLITS_BACKWARD
from orchestrator.plan.cost.collective import Flow
from orchestrator.plan.cost.dp_traffic import Windows, shard_count
from orchestrator.plan.cost.layers import Slice
from orchestrator.plan.cost.machine import Machine
from orchestrator.plan.cost.passes import How, MicroBatch, micro_batch
from orchestrator.plan.cost.tp_cp_traffic import outer_traffic
from orchestrator.plan.cost.units import Units, units_of
from orchestrator.plan.model.shape import ModelShape
from orchestrator.plan.setup import Setup, every
from orchestrator.plan.sizes import COMPUTE_BYTES, FLOAT32_BYTES, NF4_BYTES
from orchestrator.plan.stages import layers_along_pp, most_sends

OPTIMIZER_BYTES = {"adamw": 28, "adam": 28, "nadam": 60, "radam": 60, "adafactor": 60, "sgd": 28}
"""Read and written of each parameter: fused Adam reads four float32 values and writes three; the
others are made of several operations each."""
CLIP_BYTES = 12
"""For the norm of the gradients, and for scaling them."""
AGREEMENT_BYTES = 128
"""Of the sums that all ranks add up before the update (`trainer/step.py`)."""


class Timeline(NamedTuple):
    parts: dict[str, float]
    flows: list[Flow]


def timeline(setup: Setup, machine: Machine) -> Timeline:
    part = slice_of(setup)
    batch = micro_batch(machine, setup.shape, part, _how(setup))
    slowest, micro = batch.slowest, setup.micro_batches
    units = units_of(setup.shape, setup.mesh.tp, slowest.rank, _sizes(setup), setup.lora)
    sharing = shard_count(setup, machine, slowest.rank, units, _windows(setup, machine, batch))
    handed_on, pipe_flows = _handed_on(setup, machine, part)
    tied = _tied(setup, machine)
    parts = {
        "compute": micro * slowest.compute,
        "recompute": micro * slowest.again,
        "communication": micro * (slowest.talk + handed_on)
        + sharing.exposed
        + sum(flow.exposed for flow in tied),
        "contention": sharing.contention,
        "copies": sharing.copied / machine.memory_bytes_per_s,
        "host": micro * slowest.host,
        "bubble": _bubble(setup, batch, handed_on),
        "optimizer": _optimizer(setup, machine, units),
    }
    flows = [*sharing.flows, *pipe_flows, *tied, *_axis_flows(setup, machine, batch, part)]
    return Timeline({name: seconds for name, seconds in parts.items() if seconds > 0}, flows)


def passes_s(setup: Setup, machine: Machine) -> float:
    """Of a step, what does not hang on how the data-parallel ranks are arranged: all passes with
    what is said inside the model, and the bubble."""
    part = slice_of(setup)
    batch = micro_batch(machine, setup.shape, part, _how(setup))
    handed_on, _ = _handed_on(setup, machine, part)
    one = batch.slowest.seconds + handed_on
    return setup.micro_batches * one + _bubble(setup, batch, handed_on)


def slice_of(setup: Setup) -> Slice:
    return Slice(
        sequences=setup.micro_batch_size,
        tokens=setup.tokens,
        tp=setup.mesh.tp,
        cp=setup.mesh.cp,
        context=setup.context,
        dtype=setup.dtype,
        compiled=setup.compile,
        float8=setup.float8,
        lora=setup.lora,
    )


def _how(setup: Setup) -> How:
    return How(
        checkpointing=setup.checkpointing,
        every=every(setup),
        pp=setup.mesh.pp,
        pipeline=setup.pipeline,
        sharded=setup.data == "fsdp",
    )


def _sizes(setup: Setup) -> tuple[float, int, int]:
    """Bytes of a layer's weight and of any other as FSDP gathers it, and of a reduced gradient."""
    size, reduce_size = COMPUTE_BYTES[setup.dtype], COMPUTE_BYTES[setup.reduce_dtype]
    layer: float = size
    if setup.lora is not None and setup.lora.quantize == "nf4":
        layer = NF4_BYTES
    elif setup.float8 and isinstance(setup.reshard, bool) and not setup.cpu_offload:
        layer = COMPUTE_BYTES["float8"]
    return layer, size, reduce_size


def _windows(setup: Setup, machine: Machine, batch: MicroBatch) -> Windows:
    """What hides weights that travel: the layers' computing, what tp ranks say to each other on
    other links, and the host, which holds up the device but not what is on its way."""
    mesh, window, slowest = setup.mesh, batch.window, batch.slowest
    held_up = slowest.host / slowest.rank.layers
    # Backward has twice the operations of forward.
    forward, backward = held_up / 3, held_up * 2 / 3
    if mesh.tp > 1 and machine.wire(mesh.dp_shard * mesh.cp, mesh.tp).group.level != "host":
        forward, backward = forward + batch.talking[0], backward + batch.talking[1]
    return Windows(
        forward=window.forward + forward, backward=window.backward + backward, head=window.head
    )


def _handed_on(setup: Setup, machine: Machine, part: Slice) -> tuple[float, list[Flow]]:
    """Hidden states to the next stage and gradients to the one before: seconds of a micro batch,
    which torch's schedules wait for."""
    mesh, micro = setup.mesh, setup.micro_batches
    if mesh.pp == 1:
        return 0.0, []
    wire = machine.wire(mesh.pp, mesh.world_size // mesh.pp)
    size = handed_on_bytes(setup.shape, part)
    # A rank waits for what it is sent as for what it sends, also at the ends of the pipeline.
    each = 2 * setup.pipeline.stages * wire.send_s(size)
    sends, total = micro * most_sends(setup.pipeline, mesh.pp), micro * each
    where = ("pp", "send", "activations")
    return each, [Flow(*where, sends * size, sends, wire.group, total, total)]


def _tied(setup: Setup, machine: Machine) -> list[Flow]:
    """First and last stage, where these are on two ranks, add up the gradients of the matrix that
    both have, before the update (`trainer/parallel/tied.py`); no rank goes on meanwhile."""
    mesh, shape = setup.mesh, setup.shape
    first = layers_along_pp(shape, mesh.pp, setup.pipeline, setup.tokens)[0]
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


def handed_on_bytes(shape: ModelShape, part: Slice) -> float:
    """Of a rank's hidden states."""
    return part.rows * shape.hidden_size / part.tp * COMPUTE_BYTES[part.dtype]


def _bubble(setup: Setup, batch: MicroBatch, handed_on: float) -> float:
    """While the first micro batch reaches the last stage and the last one comes back.

    Every other rank's time for one micro batch: with equal ranks (pp - 1) of m + pp - 1, and with v
    stages a rank a v-th of it (Narayanan et al. 2021, section 2.2).
    """
    pp, spec, slowest = setup.mesh.pp, setup.pipeline, batch.slowest
    if pp == 1:
        return 0.0
    if spec.schedule == SPLITS_BACKWARD:
        # F + B - 2 W: what gradients of weights, put in the gaps, do not fill (Qi et al. 2023,
        # table 1), on stages that are half a rank's.
        rest = slowest.seconds - 3 * slowest.weights
        return (pp - 1) * (max(0.0, rest) + handed_on) / spec.stages
    others = sum(stage.seconds * count for stage, count in batch.stages) - slowest.seconds
    return (others + (pp - 1) * handed_on) / spec.stages


def _optimizer(setup: Setup, machine: Machine, units: Units) -> float:
    """The update, and the agreement of all ranks before it."""
    mesh = setup.mesh
    shards = {"fsdp": mesh.dp_shard, "zero1": mesh.dp_replicate, "ddp": 1}[setup.data]
    own = units.trained / (shards if setup.data == "ddp" else shards * mesh.cp)
    rate = machine.calibration.host_memory if setup.cpu_offload else machine.memory_bytes_per_s
    update = own * (OPTIMIZER_BYTES[setup.optimizer] + CLIP_BYTES) / rate
    return update + machine.wire(mesh.world_size, 1).all_reduce_s(AGREEMENT_BYTES)


def _axis_flows(setup: Setup, machine: Machine, batch: MicroBatch, part: Slice) -> list[Flow]:
    micro, rank = setup.micro_batches, batch.slowest.rank
    ends = rank.is_first + rank.is_last
    outer = outer_traffic(machine, setup.shape, part)
    flows = []
    for talk, times in batch.talks:
        sent, calls, seconds, exposed = times.sent, times.calls, times.seconds, times.exposed
        if talk.axis == "tp":
            # Each end of the model has one of either kind, forward or backward.
            sent += ends * outer.sent
            calls += ends * outer.calls
            seconds += ends * outer.seconds
            exposed += ends * outer.exposed
        what = (talk.axis, talk.collective, talk.what)
        flows.append(
            Flow(*what, micro * sent, micro * calls, talk.group, micro * seconds, micro * exposed)
        )
    return flows
