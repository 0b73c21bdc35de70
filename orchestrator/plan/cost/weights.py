"""What data-parallel ranks send each other of weights and gradients, and what of it shows.

As the trainer does it (`trainer/parallel/fsdp.py`, `ddp.py`, `zero1.py`): gradients are reduced with
the last micro batch of a step alone; FSDP gathers weights for each forward and each backward pass,
or once a step where they are not freed in between.
"""

import math
from dataclasses import dataclass

from orchestrator.plan.cost.collectives import (
    Wire,
    ring_all_reduce_bytes,
    ring_gather_bytes,
)
from orchestrator.plan.cost.kernels import SIZES
from orchestrator.plan.cost.machine import Machine
from orchestrator.plan.cost.stagework import Rank
from orchestrator.plan.setup import Setup

NF4_BYTES = 0.52
"""Of a weight in NF4, with its scales (see `plan.memory`)."""
STAGES_AT_ONCE = 3
"""Of one rank's, that torch's schedules keep gathered (`_add_unshard_reshard`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """One collective of a step, on the rank that sends the most of it."""

    axis: str
    collective: str
    what: str
    sent: float
    calls: float
    level: str
    seconds: float
    exposed: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Bytes that are gathered and reduced together."""

    gathered: float
    reduced: float
    trained: float
    """Parameters."""
    held: float
    """Parameters, frozen ones among them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Units:
    """What one rank has of the model after pp and tp."""

    layer: Unit
    layers: int
    outer: tuple[Unit, ...]
    """Embedding and head, as far as it has them."""

    @property
    def trained(self) -> float:
        return self.layers * self.layer.trained + sum(unit.trained for unit in self.outer)

    @property
    def held(self) -> float:
        return self.layers * self.layer.held + sum(unit.held for unit in self.outer)

    @property
    def gathered(self) -> float:
        return self.layers * self.layer.gathered + sum(unit.gathered for unit in self.outer)

    @property
    def reduced(self) -> float:
        return self.layers * self.layer.reduced + sum(unit.reduced for unit in self.outer)


def units_of(setup: Setup, rank: Rank) -> Units:
    shape, tp = setup.shape, setup.mesh.tp
    size, reduce_size = SIZES[setup.dtype], SIZES[setup.reduce_dtype]
    layer = math.ceil(shape.layer_weights / tp) + shape.layer_replicated
    trains = setup.lora is None

    def unit(parameters: float, bytes_each: float, trained: float) -> Unit:
        return Unit(
            gathered=parameters * bytes_each,
            reduced=trained * reduce_size,
            trained=trained,
            held=parameters,
        )

    outer = []
    vocabulary = math.ceil(shape.vocabulary_parameters / tp)
    if rank.is_first:
        own = vocabulary + shape.position_parameters
        outer.append(unit(own, size, own if trains else 0))
    if rank.is_last:
        tied_here = shape.tied_embeddings and rank.is_first
        own = shape.norm_parameters + (0 if tied_here else vocabulary)
        outer.append(unit(own, size, own if trains else 0))
    return Units(
        layer=unit(layer, layer_bytes(setup, size), layer if trains else adapters(setup)),
        layers=rank.layers,
        outer=tuple(outer),
    )


def layer_bytes(setup: Setup, size: int) -> float:
    """Of a layer's weight as it is gathered: in float8 or NF4 where the trainer can."""
    if setup.lora is not None and setup.lora.quantize == "nf4":
        return NF4_BYTES
    shards = setup.mesh.dp_shard * setup.mesh.cp
    if setup.float8 and shards > 1 and isinstance(setup.reshard, bool) and not setup.cpu_offload:
        return 1
    return size


def adapters(setup: Setup) -> float:
    """Parameters of a layer's LoRA matrices."""
    lora = setup.lora
    assert lora is not None
    targets = (into + out for name, into, out in setup.shape.linear if name in lora.target_modules)
    return lora.rank * sum(targets)


@dataclass(frozen=True, slots=True, kw_only=True)
class Windows:
    """Seconds in which a collective may hide, of one layer and of the head."""

    forward: float
    backward: float
    head: float
    """Backward."""


@dataclass(slots=True, kw_only=True)
class Sharing:
    """What a step spends on weights and gradients, beside the passes themselves."""

    flows: list[Flow]
    each_micro: float = 0.0
    """Seconds that show with each micro batch but the last."""
    last_micro: float = 0.0
    """And with the last one."""
    after: float = 0.0
    """After the optimizer."""
    hidden: float = 0.0
    """Seconds of collectives beside which something is computed."""
    copied: float = 0.0
    """Bytes that are moved on the device to put gathered weights and gradients in place."""
    calls: float = 0.0
    """Units that the host gathers or reduces with each micro batch."""


def sharing_of(setup: Setup, machine: Machine, units: Units, windows: Windows) -> Sharing:
    match setup.data:
        case "fsdp":
            return _fsdp(setup, machine, units, windows)
        case "ddp":
            return _copies(setup, machine, units, windows, zero1=False)
        case "zero1":
            return _copies(setup, machine, units, windows, zero1=True)


def gathers(setup: Setup) -> tuple[float, float]:
    """How often a step gathers each unit whole: forward and backward."""
    micro, spec = setup.micro_batches, setup.pipeline
    if setup.mesh.pp > 1:
        if spec.stages > STAGES_AT_ONCE:
            return micro, micro
        # torch's schedules keep what a backward pass gathered for the forward pass that follows.
        freed = spec.stages == 1 and setup.reshard is not False
        return 1, micro if freed else 0
    return (1, 0) if setup.reshard is False else (micro, micro)


def _fsdp(setup: Setup, machine: Machine, units: Units, windows: Windows) -> Sharing:
    mesh = setup.mesh
    shards = mesh.dp_shard * mesh.cp
    sharing = Sharing(flows=[])
    if shards * mesh.dp_replicate == 1:
        sharing.copied = units.held * 6 * setup.micro_batches * (setup.dtype != "float32")
        return sharing
    wire = machine.wire(shards, mesh.tp)
    axis = "dp_shard x cp" if mesh.cp > 1 and mesh.dp_shard > 1 else "dp_shard"
    if mesh.dp_shard == 1 and mesh.cp > 1:
        axis = "cp"
    forward, backward = gathers(setup)
    inner = wire
    partial = not isinstance(setup.reshard, bool)
    if partial and setup.reshard < shards:
        inner = machine.wire(int(setup.reshard), mesh.tp)
    _gather(sharing, units, windows, (wire, inner), (forward, backward), axis, setup)
    _reduce(sharing, units, windows, (wire, inner), setup, machine, axis, backward > 0)
    reduced = units.reduced / SIZES[setup.reduce_dtype]
    sharing.copied += units.gathered * 2 * (forward + backward)
    sharing.copied += reduced * (2 + 4) + reduced * 10 * (setup.micro_batches - 1)
    per_micro = (forward + backward) / setup.micro_batches
    sharing.calls = (units.layers + len(units.outer)) * per_micro
    return sharing


def _gather(
    sharing: Sharing,
    units: Units,
    windows: Windows,
    wires: tuple[Wire, Wire],
    times: tuple[float, float],
    axis: str,
    setup: Setup,
) -> None:
    wire, inner = wires
    forward, backward = times
    layer = wire.gather_s(units.layer.gathered)
    outer = [wire.gather_s(unit.gathered) for unit in units.outer]
    again = inner.gather_s(units.layer.gathered)
    more = units.layers - 1
    # The first unit and the first layer have nothing to hide behind, the others the layer before.
    shown = (outer[0] if outer else 0.0) + layer + more * max(0.0, layer - windows.forward)
    shown += sum(max(0.0, unit - windows.forward) for unit in outer[1:])
    shown_back = max(0.0, again - windows.head) + more * max(0.0, again - windows.backward)
    total = forward * (sum(outer) + units.layers * layer)
    total += backward * units.layers * again
    exposed = forward * shown + backward * shown_back
    sent = forward * ring_gather_bytes(wire.group.size, units.gathered)
    layers = units.layers * units.layer.gathered
    sent += backward * ring_gather_bytes(inner.group.size, layers)
    sharing.flows.append(
        Flow(
            axis=axis,
            collective="all-gather",
            what="weights",
            sent=sent,
            calls=forward * (units.layers + len(units.outer)) + backward * units.layers,
            level=wire.group.level,
            seconds=total,
            exposed=exposed,
        )
    )
    micro = setup.micro_batches
    sharing.each_micro += exposed / micro
    sharing.last_micro += exposed / micro
    sharing.hidden += total - exposed


def _reduce(  # noqa: PLR0913
    sharing: Sharing,
    units: Units,
    windows: Windows,
    wires: tuple[Wire, Wire],
    setup: Setup,
    machine: Machine,
    axis: str,
    gathers_too: bool,
) -> None:
    mesh, (wire, inner) = setup.mesh, wires
    copies = machine.wire(mesh.dp_replicate, mesh.dp_shard * mesh.cp * mesh.tp)
    shards = wire.group.size
    sizes = [units.layer.reduced] * 1
    one = wire.gather_s(sizes[0]) if sizes[0] else 0.0
    summed = copies.all_reduce_s(sizes[0] / shards) if sizes[0] else 0.0
    outer = sum(wire.gather_s(unit.reduced) for unit in units.outer if unit.reduced)
    outer_summed = sum(
        copies.all_reduce_s(unit.reduced / shards) for unit in units.outer if unit.reduced
    )
    again = inner.gather_s(units.layer.gathered) if gathers_too else 0.0
    more = units.layers - 1
    if mesh.pp > 1:
        # torch's schedules reduce all of a stage after its last backward pass.
        shown, shown_summed = units.layers * one + outer, units.layers * summed + outer_summed
    else:
        # The gather of the next layer goes over the same links; what it shows is counted there.
        room = max(0.0, windows.backward - again)
        shown = one + more * max(0.0, one - room) + (outer / max(1, len(units.outer)))
        apart = copies.group.level != wire.group.level
        room = windows.backward if apart else max(0.0, room - one)
        shown_summed = summed + more * max(0.0, summed - room)
        shown_summed += outer_summed / max(1, len(units.outer))
    total, total_summed = units.layers * one + outer, units.layers * summed + outer_summed
    calls = units.layers + len(units.outer)
    if shards > 1:
        sharing.flows.append(
            Flow(
                axis=axis,
                collective="reduce-scatter",
                what="gradients",
                sent=ring_gather_bytes(shards, units.reduced),
                calls=calls,
                level=wire.group.level,
                seconds=total,
                exposed=shown,
            )
        )
    if mesh.dp_replicate > 1:
        sharing.flows.append(
            Flow(
                axis="dp_replicate",
                collective="all-reduce",
                what="gradients",
                sent=ring_all_reduce_bytes(mesh.dp_replicate, units.reduced / shards),
                calls=calls,
                level=copies.group.level,
                seconds=total_summed,
                exposed=shown_summed,
            )
        )
    sharing.last_micro += shown + shown_summed
    sharing.hidden += total + total_summed - shown - shown_summed


def _copies(
    setup: Setup, machine: Machine, units: Units, windows: Windows, *, zero1: bool
) -> Sharing:
    """DDP's and ZeRO-1's buckets: behind the last backward pass, all of it one after the other."""
    mesh = setup.mesh
    ranks = mesh.dp_replicate * mesh.cp
    # Autocast casts float32 weights for each micro batch, and gradients back.
    cast = 6 * (setup.dtype != "float32")
    sharing = Sharing(
        flows=[], copied=(units.held * cast + units.trained * (cast + 12)) * setup.micro_batches
    )
    if ranks == 1:
        return sharing
    wire = machine.wire(ranks, mesh.tp)
    axis = "dp_replicate x cp" if mesh.cp > 1 and mesh.dp_replicate > 1 else "dp_replicate"
    axis = "cp" if mesh.dp_replicate == 1 else axis
    seconds = (wire.gather_s if zero1 else wire.all_reduce_s)(units.reduced)
    window = 0.0 if mesh.pp > 1 else units.layers * windows.backward
    last = min(seconds, seconds * units.layer.reduced / max(1.0, units.reduced))
    exposed = max(last, seconds - window) if mesh.pp == 1 else seconds
    each = ring_gather_bytes if zero1 else ring_all_reduce_bytes
    buckets = max(1.0, math.ceil(units.trained * 4 / (25 << 20)))
    sharing.flows.append(
        Flow(
            axis=axis,
            collective="reduce-scatter" if zero1 else "all-reduce",
            what="gradients",
            sent=each(ranks, units.reduced),
            calls=buckets,
            level=wire.group.level,
            seconds=seconds,
            exposed=exposed,
        )
    )
    sharing.last_micro = exposed
    sharing.hidden = seconds - exposed
    sharing.copied += units.trained * 16
    if zero1:
        whole = units.trained * 4
        after = wire.gather_s(whole)
        sharing.flows.append(
            Flow(
                axis=axis,
                collective="all-gather",
                what="weights",
                sent=ring_gather_bytes(ranks, whole),
                calls=buckets,
                level=wire.group.level,
                seconds=after,
                exposed=after,
            )
        )
        sharing.after = after
        sharing.copied += units.trained * 8
    return sharing
