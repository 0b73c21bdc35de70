"""What data-parallel ranks send each other of weights and gradients, and what of it shows.

As the trainer does it (`trainer/parallel/fsdp.py`, `ddp.py`, `zero1.py`): gradients are reduced
with the last micro batch of a step alone; FSDP gathers weights for each forward and each backward
pass, or once a step where they are not freed in between.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from orchestrator.plan.cost.collective import Flow
from orchestrator.plan.cost.collectives import (
    Wire,
    ring_all_reduce_bytes,
    ring_gather_bytes,
)
from orchestrator.plan.cost.machine import Machine
from orchestrator.plan.cost.units import Units
from orchestrator.plan.setup import Setup
from orchestrator.plan.sizes import COMPUTE_BYTES, FLOAT32_BYTES
from orchestrator.plan.stages import StageLayers, layers_along_pp, stage_gathers

BUCKET_BYTES = 25 * 2**20
"""Of the trainer's buckets (`trainer/parallel/buckets.py`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Windows:
    """Seconds in which a collective may hide: of one layer, and of the head's whole work."""

    forward: float
    backward: float
    head: float


@dataclass(slots=True, kw_only=True)
class Sharing:
    """What a step spends on weights and gradients, beside the passes themselves."""

    flows: list[Flow] = field(default_factory=list)
    contention: float = 0.0
    """Seconds by which collectives slow down what is computed beside them."""
    copied: float = 0.0
    """Bytes that are moved on the device to put weights and gradients in place."""

    def add(self, flow: Flow, wire: Wire) -> None:
        self.flows.append(flow)
        self.contention += (flow.seconds - flow.exposed) * wire.contention

    @property
    def exposed(self) -> float:
        return sum(flow.exposed for flow in self.flows)


def shard_count(
    setup: Setup, machine: Machine, rank: StageLayers, units: Units, windows: Windows
) -> Sharing:
    if setup.data == "fsdp":
        return _fsdp(setup, machine, _gathers(setup, rank), units, windows)
    return _copies(setup, machine, units, windows)


class Again(NamedTuple):
    """One stage that a pipeline's schedule freed, and gathers once more."""

    layers: int
    has_end: bool
    """It has the embedding or the head."""
    ahead: int
    """Passes through other stages between the asking and the use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathers:
    """How often a step gathers what a rank holds."""

    forward: int
    """All of it, for forward passes."""
    backward: int
    """All of it, for backward passes."""
    again: tuple[Again, ...] = ()


def _gathers(setup: Setup, rank: StageLayers) -> Gathers:
    micro, spec, mesh = setup.micro_batches, setup.pipeline, setup.mesh
    if mesh.pp == 1:
        once = setup.reshard is False
        return Gathers(forward=1 if once else micro, backward=0 if once else micro)
    if spec.stages == 1:
        # torch's schedules keep what a backward pass gathered for the forward pass that follows.
        return Gathers(forward=1, backward=0 if setup.reshard is False else micro)
    alike = [
        _again(rank, stage_gathers(spec, mesh.pp, number, micro))
        for number, held in enumerate(layers_along_pp(setup.shape, mesh.pp, spec, setup.tokens))
        if held == rank
    ]
    most = max(alike, key=lambda again: sum(one.layers for one in again))
    return Gathers(forward=1, backward=0, again=most)


def _again(rank: StageLayers, gathers: Sequence[Sequence[int]]) -> tuple[Again, ...]:
    """All but the first gathering of each stage of `rank`."""
    last = len(gathers) - 1
    return tuple(
        Again(layers, (stage == 0 and rank.is_first) or (stage == last and rank.is_last), ahead)
        for stage, (layers, times) in enumerate(zip(rank.stages, gathers, strict=True))
        for ahead in times[1:]
    )


def _fsdp(
    setup: Setup, machine: Machine, often: Gathers, units: Units, windows: Windows
) -> Sharing:
    mesh, sharing = setup.mesh, Sharing()
    shards = mesh.dp_shard * mesh.cp
    times = often.forward + often.backward + _again_bytes(often, units) / units.gathered
    # What is gathered is cast before, and copied to its place behind; gradients are cast, added up
    # and copied to where each rank's part lies together.
    sharing.copied = (units.gathered * 2 + units.held / shards * 6) * times
    reduced = units.trained
    sharing.copied += reduced * 6 + reduced * 10 * (setup.micro_batches - 1)
    if shards * mesh.dp_replicate == 1:
        return sharing
    wire = machine.wire(shards, mesh.tp)
    inner = wire
    if not isinstance(setup.reshard, bool) and setup.reshard < shards:
        inner = machine.wire(setup.reshard, mesh.tp)
    ways = Ways(wire, inner, _together("dp_shard", mesh.dp_shard, mesh.cp), often)
    if shards > 1:
        _gather(sharing, setup, machine, units, windows, ways)
    _reduce(sharing, setup, machine, units, windows, ways)
    return sharing


def _together(axis: str, size: int, cp: int) -> str:
    """The name of a group along `axis` and cp."""
    if cp == 1:
        return axis
    return f"{axis} x cp" if size > 1 else "cp"


class Ways(NamedTuple):
    wire: Wire
    """Between all shards."""
    inner: Wire
    """Between those that hold a copy from forward to backward."""
    axis: str
    """Theirs."""
    often: Gathers


def _again_bytes(often: Gathers, units: Units) -> float:
    outer = sum(unit.gathered for unit in units.outer)
    return sum(one.layers * units.layer.gathered + one.has_end * outer for one in often.again)


def _gather(
    sharing: Sharing,
    setup: Setup,
    machine: Machine,
    units: Units,
    windows: Windows,
    ways: Ways,
) -> None:
    wire, inner, axis, often = ways
    forward, backward = often.forward, often.backward
    fetched = _offloaded(setup, machine, units.held / units.layers)
    first = fetched + wire.gather_s(units.layer.gathered)
    again = fetched + inner.gather_s(units.layer.gathered)
    root, embedding, head = (_gather_s(wire, unit.gathered) for unit in units.outer)
    embedding_again = _gather_s(inner, units.embedding.gathered)
    # The first units and the first layer have nothing to hide behind; any other has the layer
    # before, if it is asked for early enough.
    room, room_back = windows.forward, windows.backward
    shown = root + embedding + first + (units.layers - 1) * max(0.0, first - room)
    shown += max(0.0, head - room)
    shown_back = max(0.0, again - windows.head) + max(0, units.again - 1) * max(
        0.0, again - room_back
    )
    shown_back += max(0.0, embedding_again - room_back)
    outer = root + embedding + head
    more = [(one, one.layers * first + one.has_end * outer) for one in often.again]
    # Passes are taken to be forward ones, through stages as long as the one that is waited for.
    shown_more = sum(max(0.0, time - one.ahead * one.layers * room) for one, time in more)
    ends = units.number - units.layers
    whole = forward * units.gathered + _again_bytes(often, units)
    ahead = (
        ring_gather_bytes(wire.group.size, whole),
        forward * units.number + sum(one.layers + one.has_end * ends for one, _ in more),
        forward * (units.layers * first + outer) + sum(time for _, time in more),
        forward * shown + shown_more,
    )
    whole_again = units.again * units.layer.gathered + units.embedding.gathered
    behind = (
        backward * ring_gather_bytes(inner.group.size, whole_again),
        backward * (units.again + (embedding_again > 0)),
        backward * (units.again * again + embedding_again),
        backward * shown_back,
    )
    if inner is wire:
        both = [one + other for one, other in zip(ahead, behind, strict=True)]
        _add_gathers(sharing, axis, "weights", wire, both)
    else:
        _add_gathers(sharing, axis, "weights", wire, ahead)
        _add_gathers(sharing, axis, "weights again", inner, behind)


def _add_gathers(
    sharing: Sharing, axis: str, what: str, wire: Wire, numbers: Iterable[float]
) -> None:
    sent, calls, seconds, exposed = numbers
    flow = Flow(axis, "all-gather", what, sent, calls, wire.group, seconds, exposed)
    sharing.add(flow, wire)


def _offloaded(setup: Setup, machine: Machine, parameters: float) -> float:
    """Seconds in which a rank's part of so many float32 values comes from its host, or goes."""
    if not setup.cpu_offload:
        return 0.0
    own = parameters / (setup.mesh.dp_shard * setup.mesh.cp)
    return own * FLOAT32_BYTES / machine.calibration.host_link


def _gather_s(wire: Wire, size: float) -> float:
    return wire.gather_s(size) if size else 0.0


def _reduce(
    sharing: Sharing,
    setup: Setup,
    machine: Machine,
    units: Units,
    windows: Windows,
    ways: Ways,
) -> None:
    """Once a step, with the last backward pass: between shards, then between their copies."""
    mesh, (wire, inner, axis, often) = setup.mesh, ways
    shards = wire.group.size
    copies = machine.wire(mesh.dp_replicate, mesh.dp_shard * mesh.cp * mesh.tp)
    outer = [unit.reduced for unit in units.outer if unit.reduced]
    one = wire.gather_s(units.layer.reduced)
    one += _offloaded(setup, machine, units.trained / units.layers)
    summed = copies.all_reduce_s(units.layer.reduced / shards)
    rest = sum(wire.gather_s(size) for size in outer)
    rest_summed = sum(copies.all_reduce_s(size / shards) for size in outer)
    total, total_summed = units.layers * one + rest, units.layers * summed + rest_summed
    if mesh.pp > 1:
        # torch's schedules reduce all of a stage after its last backward pass.
        shown, shown_summed = total, total_summed
    else:
        # Gathers of the same pass go over the same links.
        busy = inner.gather_s(units.layer.gathered) if often.backward else 0.0
        room = max(0.0, windows.backward - busy)
        more = units.layers - 1
        # The last to be reduced, the first layer's and the embedding's, are waited for.
        shown = one + more * max(0.0, one - room) + (wire.gather_s(outer[0]) if outer else 0.0)
        apart = copies.group.level != wire.group.level and copies.group.blocks > 1
        room = windows.backward if apart else max(0.0, room - one)
        shown_summed = summed + more * max(0.0, summed - room)
        shown_summed += copies.all_reduce_s(outer[0] / shards) if outer else 0.0
    calls = units.layers + len(outer)
    if shards > 1:
        sent = ring_gather_bytes(shards, units.reduced)
        flow = Flow(axis, "reduce-scatter", "gradients", sent, calls, wire.group, total, shown)
        sharing.add(flow, wire)
    if mesh.dp_replicate > 1:
        sent = ring_all_reduce_bytes(mesh.dp_replicate, units.reduced / shards)
        where = ("dp_replicate", "all-reduce", "gradients")
        flow = Flow(*where, sent, calls, copies.group, total_summed, shown_summed)
        sharing.add(flow, copies)


def _copies(setup: Setup, machine: Machine, units: Units, windows: Windows) -> Sharing:
    """DDP's and ZeRO-1's buckets: behind the last backward pass, one after the other."""
    mesh, zero1 = setup.mesh, setup.data == "zero1"
    ranks = mesh.dp_replicate * mesh.cp
    # Autocast casts float32 weights for each micro batch, and gradients back, to add them up.
    cast = 6 * (setup.dtype != "float32")
    sharing = Sharing(
        copied=(units.held * cast + units.trained * (cast + 12)) * setup.micro_batches
    )
    if ranks == 1:
        return sharing
    wire = machine.wire(ranks, mesh.tp)
    axis = _together("dp_replicate", mesh.dp_replicate, mesh.cp)
    reduce_s = wire.gather_s if zero1 else wire.all_reduce_s
    reduce_bytes = ring_gather_bytes if zero1 else ring_all_reduce_bytes
    # Most matrices are larger than a bucket, and each of these is one.
    matrices = units.layers * len(setup.shape.linear)
    buckets = max(1, min(matrices, math.ceil(units.trained * FLOAT32_BYTES / BUCKET_BYTES)))
    one = reduce_s(units.reduced / buckets)
    total = buckets * one
    room = 0.0 if mesh.pp > 1 else units.layers * windows.backward
    shown = max(one, total - room)
    kind = "reduce-scatter" if zero1 else "all-reduce"
    sent = reduce_bytes(ranks, units.reduced)
    sharing.add(Flow(axis, kind, "gradients", sent, buckets, wire.group, total, shown), wire)
    sharing.copied += units.trained * 2 * (FLOAT32_BYTES + COMPUTE_BYTES[setup.reduce_dtype])
    if zero1:
        # After the update, as float32, and nothing is computed meanwhile.
        whole = units.trained * FLOAT32_BYTES
        total = buckets * wire.gather_s(whole / buckets)
        sent = ring_gather_bytes(ranks, whole)
        sharing.add(
            Flow(axis, "all-gather", "weights", sent, buckets, wire.group, total, total), wire
        )
        sharing.copied += whole * 2
    return sharing
