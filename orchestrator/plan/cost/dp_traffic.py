"""The traffic of data parallelism (weights and gradients), and how much of it is exposed.

It follows the trainer (`trainer/parallel/fsdp.py`, `ddp.py`, `zero1.py`): gradients are reduced
with the last micro batch of a step, or with each one (`reduce_gradients`). FSDP gathers weights for
each forward and each backward pass, or once per step if they are not freed in between.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from msgspec import Struct

from orchestrator.contract.spec.parallel_spec import PipelineSpec
from orchestrator.plan.cost.collective import Flow
from orchestrator.plan.cost.collectives import Wire, ring_all_reduce_bytes, ring_gather_bytes
from orchestrator.plan.cost.machine import Machine
from orchestrator.plan.cost.units import Units
from orchestrator.plan.setup import Setup
from orchestrator.plan.sizes import COMPUTE_BYTES, FLOAT32_BYTES
from orchestrator.plan.stages import StageLayers, layers_along_pp, stage_gathers

BUCKET_BYTES = 25 * 2**20
"""Size of the trainer's buckets (`trainer/parallel/buckets.py`)."""


class Windows(Struct, frozen=True, kw_only=True):
    """Seconds of computation that a collective can overlap with: per layer, and for the head."""

    forward: float
    backward: float
    head: float


@dataclass(slots=True, kw_only=True)
class DataTraffic:
    """The cost of data parallelism in a step, in addition to the passes."""

    flows: list[Flow] = field(default_factory=list)
    contention: float = 0.0
    """Seconds by which collectives delay the computation that they overlap with."""
    copied: float = 0.0
    """Bytes that are copied on the device before and after collectives."""

    def add(self, flow: Flow, wire: Wire) -> None:
        self.flows.append(flow)
        self.contention += (flow.seconds - flow.exposed) * wire.contention

    @property
    def exposed(self) -> float:
        return sum(flow.exposed for flow in self.flows)


def hidden_along_pp(spec: PipelineSpec, machine: Machine) -> float:
    """Share of the sends of a pipeline, and of the reductions after it, that computation hides.
    With one stage per rank there is no other stage to compute meanwhile."""
    return machine.calibration.pp_hidden if spec.stages > 1 else 0.0


def data_traffic(
    setup: Setup, machine: Machine, rank: StageLayers, units: Units, windows: Windows
) -> DataTraffic:
    if setup.data == "fsdp":
        return _fsdp(setup, machine, _gathers(setup, machine, rank), units, windows)
    return _replicated(setup, machine, units, windows)


class Regather(NamedTuple):
    """A stage that a pipeline schedule has freed and gathers again."""

    layers: int
    has_end: bool
    """The stage has the embedding or the head."""
    ahead: int
    """Passes through other stages between the start of the gather and its use."""


class Gathers(Struct, frozen=True, kw_only=True):
    """How often a step gathers the weights of a rank."""

    forward: int
    """Gathers of all weights for forward passes."""
    backward: int
    """Gathers of all weights for backward passes."""
    again: tuple[Regather, ...] = ()
    """Further gathers of single stages, with several stages per rank."""


def _gathers(setup: Setup, machine: Machine, rank: StageLayers) -> Gathers:
    micro, spec, mesh = setup.micro_batches, setup.pipeline, setup.mesh
    if mesh.pp == 1:
        once = setup.reshard is False
        return Gathers(forward=1 if once else micro, backward=0 if once else micro)
    if spec.stages == 1:
        # torch's schedules keep the weights of a backward pass for the next forward pass.
        return Gathers(forward=1, backward=0 if setup.reshard is False else micro)
    if setup.reshard is False and not machine.calibration.pp_regathers:
        return Gathers(forward=1, backward=0)
    # Several ranks along pp may hold the same layers; the one that gathers most is the slowest.
    ranks = layers_along_pp(setup.shape, mesh.pp, spec, setup.tokens, setup.even_stages)
    same_layers = [
        _regathers(rank, stage_gathers(spec, mesh.pp, number, micro))
        for number, held in enumerate(ranks)
        if held == rank
    ]
    most = max(same_layers, key=lambda found: sum(one.layers for one in found))
    return Gathers(forward=1, backward=0, again=most)


def _regathers(rank: StageLayers, gathers: Sequence[Sequence[int]]) -> tuple[Regather, ...]:
    """All gathers of each stage of `rank` except its first one."""
    last = len(gathers) - 1
    return tuple(
        Regather(layers, (stage == 0 and rank.is_first) or (stage == last and rank.is_last), ahead)
        for stage, (layers, times) in enumerate(zip(rank.stages, gathers, strict=True))
        for ahead in times[1:]
    )


def _fsdp(
    setup: Setup, machine: Machine, gathers: Gathers, units: Units, windows: Windows
) -> DataTraffic:
    mesh, traffic = setup.mesh, DataTraffic()
    shards = mesh.dp_shard * mesh.cp
    times = gathers.forward + gathers.backward + _regathered_bytes(gathers, units) / units.gathered
    # Weights are cast before a gather and copied out of the buffer after it. Gradients are cast,
    # accumulated, and copied into a buffer where each rank's part is contiguous.
    traffic.copied = (units.gathered * 2 + units.held / shards * 6) * times
    reduced = units.trained
    if setup.reduces_each:
        # Shards are summed.
        traffic.copied += (reduced * 6 + reduced / shards * 12) * setup.micro_batches
    else:
        added = machine.calibration.accumulate_bytes * (setup.micro_batches - 1)
        traffic.copied += reduced * (6 + added)
    if shards * mesh.dp_replicate == 1:
        return traffic
    wire = machine.wire(shards, mesh.tp)
    inner = wire
    # With a numeric reshard_after_forward, the backward pass gathers from fewer ranks.
    if not isinstance(setup.reshard, bool) and setup.reshard < shards:
        inner = machine.wire(setup.reshard, mesh.tp)
    links = ShardLinks(wire, inner, _joint_axis("dp_shard", mesh.dp_shard, mesh.cp), gathers)
    if shards > 1:
        _gather(traffic, setup, machine, units, windows, links)
    _reduce(traffic, setup, machine, units, windows, links)
    return traffic


def _joint_axis(axis: str, size: int, cp: int) -> str:
    """The name of the group along `axis` and cp."""
    if cp == 1:
        return axis
    return f"{axis} x cp" if size > 1 else "cp"


class ShardLinks(NamedTuple):
    wire: Wire
    """Between all shards."""
    inner: Wire
    """Between the ranks that together hold one copy from forward to backward."""
    axis: str
    """Name of the sharding group."""
    gathers: Gathers


def _regathered_bytes(gathers: Gathers, units: Units) -> float:
    outer = sum(unit.gathered for unit in units.outer)
    return sum(one.layers * units.layer.gathered + one.has_end * outer for one in gathers.again)


def _gather(
    traffic: DataTraffic,
    setup: Setup,
    machine: Machine,
    units: Units,
    windows: Windows,
    links: ShardLinks,
) -> None:
    wire, inner, axis, gathers = links
    forward, backward = gathers.forward, gathers.backward
    fetched = _offloaded(setup, machine, units.held / units.layers)
    first = fetched + wire.gather_s(units.layer.gathered)
    again = fetched + inner.gather_s(units.layer.gathered)
    root, embedding, head = (_gather_s(wire, unit.gathered) for unit in units.outer)
    embedding_again = _gather_s(inner, units.embedding.gathered)
    # The gathers of the first units and of the first layer are fully exposed. Each other gather
    # overlaps with the computation of the previous layer.
    room, room_back = windows.forward, windows.backward
    shown = root + embedding + first + (units.layers - 1) * max(0.0, first - room)
    shown += max(0.0, head - room)
    shown_back = max(0.0, again - windows.head) + max(0, units.again - 1) * max(
        0.0, again - room_back
    )
    shown_back += max(0.0, embedding_again - room_back)
    outer = root + embedding + head
    more = [(one, one.layers * first + one.has_end * outer) for one in gathers.again]
    # Assumption: the passes in between are forward passes through equally long stages.
    shown_more = sum(max(0.0, time - one.ahead * one.layers * room) for one, time in more)
    ends = units.number - units.layers
    whole = forward * units.gathered + _regathered_bytes(gathers, units)
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
        _add_gathers(traffic, axis, "weights", wire, both)
    else:
        _add_gathers(traffic, axis, "weights", wire, ahead)
        _add_gathers(traffic, axis, "weights again", inner, behind)


def _add_gathers(
    traffic: DataTraffic, axis: str, what: str, wire: Wire, numbers: Iterable[float]
) -> None:
    sent, calls, seconds, exposed = numbers
    flow = Flow(axis, "all-gather", what, sent, calls, wire.group, seconds, exposed)
    traffic.add(flow, wire)


def _offloaded(setup: Setup, machine: Machine, parameters: float) -> float:
    """Seconds to copy a rank's part of so many float32 values to or from host memory."""
    if not setup.cpu_offload:
        return 0.0
    own = parameters / (setup.mesh.dp_shard * setup.mesh.cp)
    return own * FLOAT32_BYTES / machine.calibration.host_link


def _gather_s(wire: Wire, size: float) -> float:
    return wire.gather_s(size) if size else 0.0


def _reduce(
    traffic: DataTraffic,
    setup: Setup,
    machine: Machine,
    units: Units,
    windows: Windows,
    links: ShardLinks,
) -> None:
    """In the last backward pass of a step, or in each: reduce-scatter over shards. Then, once per
    step, all-reduce over replicas."""
    mesh, (wire, inner, axis, gathers) = setup.mesh, links
    shards = wire.group.size
    copies = machine.wire(mesh.dp_replicate, mesh.dp_shard * mesh.cp * mesh.tp)
    outer = [unit.reduced for unit in units.outer if unit.reduced]
    one = wire.gather_s(units.layer.reduced)
    one += _offloaded(setup, machine, units.trained / units.layers)
    summed = copies.all_reduce_s(units.layer.reduced / shards)
    rest = sum(wire.gather_s(size) for size in outer)
    rest_summed = sum(copies.all_reduce_s(size / shards) for size in outer)
    total, total_summed = units.layers * one + rest, units.layers * summed + rest_summed
    waiting = 0.0
    if mesh.pp > 1 and not setup.reduces_each:
        # torch's schedules reduce a whole stage after its last backward pass, without overlap.
        waiting = 1 - hidden_along_pp(setup.pipeline, machine)
    shown, shown_summed = total, total_summed
    if waiting < 1:
        # The gathers of the same pass use the same links, so less time is left for reductions.
        busy = inner.gather_s(units.layer.gathered) if gathers.backward else 0.0
        hiding = machine.calibration.reduce_hidden * windows.backward
        room = max(0.0, hiding - busy)
        more = units.layers - 1
        # The last reductions (first layer and embedding) have no computation left to overlap with.
        shown = one + more * max(0.0, one - room) + (wire.gather_s(outer[0]) if outer else 0.0)
        # Replicas on links of another level do not compete with the reduce-scatter.
        other_links = copies.group.level != wire.group.level and copies.group.blocks > 1
        room = hiding if other_links else max(0.0, room - one)
        shown_summed = summed + more * max(0.0, summed - room)
        shown_summed += copies.all_reduce_s(outer[0] / shards) if outer else 0.0
        shown += waiting * (total - shown)
        shown_summed += waiting * (total_summed - shown_summed)
    calls = units.layers + len(outer)
    if shards > 1:
        times = setup.micro_batches if setup.reduces_each else 1
        sent = times * ring_gather_bytes(shards, units.reduced)
        once = (times * calls, wire.group, times * total, times * shown)
        flow = Flow(axis, "reduce-scatter", "gradients", sent, *once)
        traffic.add(flow, wire)
    if mesh.dp_replicate > 1:
        sent = ring_all_reduce_bytes(mesh.dp_replicate, units.reduced / shards)
        where = ("dp_replicate", "all-reduce", "gradients")
        flow = Flow(*where, sent, calls, copies.group, total_summed, shown_summed)
        traffic.add(flow, copies)


def _replicated(setup: Setup, machine: Machine, units: Units, windows: Windows) -> DataTraffic:
    """DDP and ZeRO-1: buckets are reduced one after the other during the last backward pass."""
    mesh, zero1 = setup.mesh, setup.data == "zero1"
    ranks = mesh.dp_replicate * mesh.cp
    # For each micro batch, autocast casts float32 weights, and gradients back to accumulate them.
    cast = 6 * (setup.dtype != "float32")
    traffic = DataTraffic(
        copied=(units.held * cast + units.trained * (cast + 12)) * setup.micro_batches
    )
    if ranks == 1:
        return traffic
    wire = machine.wire(ranks, mesh.tp)
    axis = _joint_axis("dp_replicate", mesh.dp_replicate, mesh.cp)
    reduce_s = wire.gather_s if zero1 else wire.all_reduce_s
    reduce_bytes = ring_gather_bytes if zero1 else ring_all_reduce_bytes
    # A matrix that is larger than a bucket is a bucket of its own.
    matrices = units.layers * len(setup.shape.linear)
    buckets = max(1, min(matrices, math.ceil(units.trained * FLOAT32_BYTES / BUCKET_BYTES)))
    one = reduce_s(units.reduced / buckets)
    total = buckets * one
    hiding = machine.calibration.reduce_hidden * windows.backward
    room = 0.0 if mesh.pp > 1 else units.layers * hiding
    shown = max(one, total - room)
    kind = "reduce-scatter" if zero1 else "all-reduce"
    sent = reduce_bytes(ranks, units.reduced)
    traffic.add(Flow(axis, kind, "gradients", sent, buckets, wire.group, total, shown), wire)
    reduce_size = COMPUTE_BYTES[setup.reduce_dtype]
    if reduce_size != FLOAT32_BYTES:
        # float32 gradients are reduced where they are; others are cast, and back.
        traffic.copied += units.trained * 2 * (FLOAT32_BYTES + reduce_size)
    if zero1:
        # Updated weights are gathered as float32 after the update, without any overlap.
        whole = units.trained * FLOAT32_BYTES
        total = buckets * wire.gather_s(whole / buckets)
        sent = ring_gather_bytes(ranks, whole)
        traffic.add(
            Flow(axis, "all-gather", "weights", sent, buckets, wire.group, total, total), wire
        )
    return traffic
