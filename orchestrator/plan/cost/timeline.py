"""One optimizer step on the rank that holds up the others: where its seconds go."""

import math
from dataclasses import dataclass

from orchestrator.contract.pipeline import SPLITS_BACKWARD
from orchestrator.plan.cost.kernels import SIZES
from orchestrator.plan.cost.layers import Slice
from orchestrator.plan.cost.machine import Machine
from orchestrator.plan.cost.stagework import LayerWork, Rank, layer_work, outer_work, ranks_along
from orchestrator.plan.cost.weights import Flow, Units, Windows, sharing_of, units_of
from orchestrator.plan.setup import Setup

OPTIMIZER_BYTES = {"adamw": 28, "adam": 28, "nadam": 60, "radam": 60, "adafactor": 60, "sgd": 28}
"""Read and written of each parameter: fused Adam reads four float32 values and writes three; the
others are made of several operations each."""
CLIP_BYTES = 12
"""For the norm of the gradients, and for scaling them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    parts: dict[str, float]
    flows: list[Flow]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One kind of rank along pp, with one micro batch."""

    rank: Rank
    compute: float
    inputs: float
    weights: float
    again: float
    talk: float
    host: float
    """Seconds by which the host holds up its device."""

    @property
    def seconds(self) -> float:
        return self.compute + self.again + self.talk + self.host


def timeline(setup: Setup, machine: Machine) -> Timeline:
    part = slice_of(setup)
    layer = layer_work(machine, setup.shape, part, setup.context)
    ranks = ranks_along(setup.shape, setup.mesh.pp, setup.pipeline, setup.tokens)
    stages = [(_stage(setup, machine, part, layer, rank), count) for rank, count in ranks]
    slowest = max((stage for stage, _ in stages), key=lambda stage: stage.seconds)
    units = units_of(setup, slowest.rank)
    sharing = sharing_of(setup, machine, units, _windows(setup, machine, part, layer))
    micro = setup.micro_batches
    hand_over, pipe_flows = _hand_over(setup, machine, part)
    copies = sharing.copied / machine.memory_bytes_per_s
    shown = (micro - 1) * sharing.each_micro + sharing.last_micro + sharing.after
    parts = {
        "compute": micro * slowest.compute,
        "recompute": micro * slowest.again,
        "communication": micro * (slowest.talk + hand_over) + shown,
        "contention": machine.calibration.contention * max(0.0, sharing.hidden),
        "copies": copies,
        "host": micro * slowest.host,
        "bubble": _bubble(setup, stages, slowest, hand_over),
        "optimizer": _optimizer(setup, machine, units),
    }
    flows = [*sharing.flows, *pipe_flows, *_talk_flows(setup, machine, layer, slowest, part)]
    return Timeline(parts={k: v for k, v in parts.items() if v > 0}, flows=flows)


def slice_of(setup: Setup) -> Slice:
    return Slice(
        sequences=setup.micro_batch_size,
        tokens=setup.tokens,
        tp=setup.mesh.tp,
        cp=setup.mesh.cp,
        dtype=setup.dtype,
        compiled=setup.compile,
        float8=setup.float8,
        trains_weights=setup.lora is None,
    )


def _again(setup: Setup) -> tuple[str, float]:
    """Which forward passes are done again, and of which share of the layers."""
    if setup.checkpointing == "every_k":
        every = setup.checkpoint_every or max(1, round(math.sqrt(setup.shape.num_layers)))
        return "full", (setup.shape.num_layers // every) / setup.shape.num_layers
    return setup.checkpointing, 1.0


def _stage(setup: Setup, machine: Machine, part: Slice, layer: LayerWork, rank: Rank) -> Stage:
    embedding, head, outer = outer_work(machine, setup.shape, part)
    kind, share = _again(setup)
    layers, passes = rank.layers, layer.passes
    again = layers * share * layer.again[kind]
    talk = layers * (layer.forward_talk + layer.backward_talk)
    if kind == "full":
        talk += layers * share * layer.again_talk
    forward, inputs = layers * passes.forward, layers * passes.inputs
    weights = layers * passes.weights
    ops = float(layers) * (passes.forward_ops + passes.backward_ops)
    if kind != "none":
        ops += layers * share * passes.forward_ops
    for there, outside, at in ((rank.is_first, embedding, 0), (rank.is_last, head, 1)):
        if there:
            forward, inputs = forward + outside.forward, inputs + outside.inputs
            weights += outside.weights
            ops += outside.forward_ops + outside.backward_ops
            if outer:
                talk += outer[at].forward_exposed + outer[at].backward_exposed
    calibration = machine.calibration
    each = calibration.host_op_s
    if setup.mesh.tp > 1 and not setup.compile:
        each = max(each, calibration.sharded_op_s)
    units = layers * 3 if setup.data == "fsdp" else 0
    host = ops * each + units * calibration.unit_s
    device = forward + inputs + weights + again + talk
    return Stage(
        rank=rank,
        compute=forward + inputs + weights,
        inputs=inputs,
        weights=weights,
        again=again,
        talk=talk,
        host=max(0.0, host - device) if calibration.gap_s else 0.0,
    )


def _windows(setup: Setup, machine: Machine, part: Slice, layer: LayerWork) -> Windows:
    """What a layer computes, and what it says on other links than the weights travel on."""
    mesh, passes = setup.mesh, layer.passes
    kind, share = _again(setup)
    _, head, _ = outer_work(machine, setup.shape, part)
    backward = passes.backward + share * layer.again[kind]
    forward = passes.forward
    shards = machine.wire(mesh.dp_shard * mesh.cp, mesh.tp).group
    if mesh.tp > 1 and shards.level != "host":
        forward += layer.forward_talk
        backward += layer.backward_talk
    return Windows(forward=forward, backward=backward, head=head.forward + head.backward)


def _hand_over(setup: Setup, machine: Machine, part: Slice) -> tuple[float, list[Flow]]:
    """Hidden states to the next stage and gradients to the one before: seconds of a micro batch."""
    mesh = setup.mesh
    if mesh.pp == 1:
        return 0.0, []
    wire = machine.wire(mesh.pp, mesh.world_size // mesh.pp)
    size = part.rows * setup.shape.hidden_size / mesh.tp * SIZES[setup.dtype]
    seconds = 2 * setup.pipeline.stages * wire.send_s(size)
    calls = 2 * setup.pipeline.stages * setup.micro_batches
    flow = Flow(
        axis="pp",
        collective="send",
        what="activations",
        sent=calls * size,
        calls=calls,
        level=wire.group.level,
        seconds=seconds * setup.micro_batches,
        exposed=seconds * setup.micro_batches,
    )
    return seconds, [flow]


def _bubble(
    setup: Setup, stages: list[tuple[Stage, int]], slowest: Stage, hand_over: float
) -> float:
    """While the first micro batch reaches the last stage and the last one comes back.

    Every other rank's time for one micro batch: with equal ranks (pp - 1) of m + pp - 1 (Narayanan
    et al. 2021, section 2.2), a part of it with several stages a rank.
    """
    pp, spec = setup.mesh.pp, setup.pipeline
    if pp == 1:
        return 0.0
    if spec.schedule == SPLITS_BACKWARD:
        # What gradients of weights, put in the gaps, do not fill (Qi et al. 2023, table 1).
        rest = slowest.seconds - slowest.weights - slowest.weights
        return (pp - 1) * max(0.0, rest - slowest.weights) / spec.stages
    total = sum(stage.seconds * count for stage, count in stages) - slowest.seconds
    return (total + (pp - 1) * hand_over) / spec.stages


def _optimizer(setup: Setup, machine: Machine, units: Units) -> float:
    """The update, and the agreement of all ranks before it."""
    mesh = setup.mesh
    sharing = {
        "fsdp": mesh.dp_shard * mesh.cp,
        "ddp": 1,
        "zero1": mesh.dp_replicate * mesh.cp,
    }[setup.data]
    own = units.trained / sharing
    size = own * (OPTIMIZER_BYTES[setup.optimizer] + CLIP_BYTES)
    agree = machine.wire(mesh.world_size, 1).all_reduce_s(128)
    if not setup.cpu_offload:
        return size / machine.memory_bytes_per_s + agree
    calibration = machine.calibration
    return size / calibration.host_memory + 2 * own * 4 / calibration.host_link + agree


def _talk_flows(
    setup: Setup, machine: Machine, layer: LayerWork, slowest: Stage, part: Slice
) -> list[Flow]:
    mesh, micro = setup.mesh, setup.micro_batches
    kind, share = _again(setup)
    again = share if kind == "full" else 0.0
    strides = {"tp": (mesh.tp, 1), "cp": (mesh.cp, mesh.tp)}
    _, _, outer = outer_work(machine, setup.shape, part)
    ends = slowest.rank.is_first + slowest.rank.is_last
    times = slowest.rank.layers * micro
    flows = []
    for at, talk in enumerate(layer.talks):
        more = again * talk.again
        sent, calls, seconds = (
            times * (one * (1 + more) + back)
            for one, back in zip(talk.forward, talk.backward, strict=True)
        )
        exposed = times * (talk.forward_exposed * (1 + more) + talk.backward_exposed)
        if talk.axis == "tp" and at < len(outer):
            # One of the two at each end goes forward, the other backward.
            sent += ends * micro * outer[at].forward[0]
            calls += ends * micro
            seconds += ends * micro * outer[at].forward[2]
            exposed += ends * micro * outer[at].forward[2]
        flows.append(
            Flow(
                axis=talk.axis,
                collective=talk.collective,
                what=talk.what,
                sent=sent,
                calls=calls,
                level=machine.wire(*strides[talk.axis]).group.level,
                seconds=seconds,
                exposed=exposed,
            )
        )
    return flows
