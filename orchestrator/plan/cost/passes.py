"""One micro batch on each rank of a pipeline: forward and backward, with all that tp and cp say."""

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

from orchestrator.contract.spec.parallel_spec import PipelineSpec
from orchestrator.plan.cost.dp_traffic import Windows
from orchestrator.plan.cost.layers import (
    Passes,
    Slice,
    embedding_passes,
    head_passes,
    layer_passes,
)
from orchestrator.plan.cost.machine import Machine
from orchestrator.plan.cost.tp_cp_traffic import (
    AxisTraffic,
    Times,
    context_traffic,
    outer_traffic,
    tensor_traffic,
)
from orchestrator.plan.model.shape import ModelShape
from orchestrator.plan.setup import Checkpointing
from orchestrator.plan.stages import StageLayers, layers_along_pp

UNIT_CALLS = 3
"""Of FSDP for each unit: two gathers and a reduction, with their hooks and copies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class How:
    """What of a setup a micro batch's time depends on, beside its shape."""

    checkpointing: Checkpointing
    every: int
    """The k of `every_k`."""
    pp: int
    pipeline: PipelineSpec
    sharded: bool
    """By FSDP, whose hooks the host runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One kind of rank along pp."""

    rank: StageLayers
    compute: float
    weights: float
    """Of it, gradients of weights."""
    again: float
    """Recomputation."""
    talk: float
    host: float
    """Seconds by which the host holds up its device."""

    @property
    def seconds(self) -> float:
        return self.compute + self.again + self.talk + self.host


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    stages: tuple[tuple[Stage, int], ...]
    """And how many ranks there are of each."""
    slowest: Stage
    talks: tuple[tuple[AxisTraffic, Times], ...]
    """On the slowest rank, all together."""
    window: Windows
    """Without what tp ranks say."""
    talking: tuple[float, float]
    """Seconds of it in a layer, forward and backward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    passes: Passes
    merging: float
    """Forward seconds of putting attention together from the parts of cp ranks."""
    talks: tuple[AxisTraffic, ...]
    repeated: float
    """Share of the layers whose forward pass is done again."""
    again: float
    """Seconds that a repeated forward pass takes."""
    repeats_talk: bool

    @property
    def compute(self) -> float:
        # Gradients are put together as results are, those of queries and those of keys.
        return self.passes.forward + self.passes.backward + 3 * self.merging


@lru_cache(maxsize=16384)
def micro_batch(machine: Machine, shape: ModelShape, part: Slice, how: How) -> MicroBatch:
    layer = _layer(machine, shape, part, how)
    kinds = _kinds(shape, how.pp, how.pipeline, part.tokens)
    stages = tuple((_stage(machine, shape, part, how, layer, kind), n) for kind, n in kinds)
    slowest = max((stage for stage, _ in stages), key=lambda stage: stage.seconds)
    head = head_passes(machine, shape, part)
    again = layer.repeated * layer.again
    forward = sum(talk.forward.exposed for talk in layer.talks if talk.axis == "tp")
    backward = sum(talk.backward.exposed for talk in layer.talks if talk.axis == "tp")
    return MicroBatch(
        stages=stages,
        slowest=slowest,
        talks=tuple((talk, _total(layer, talk, slowest.rank)) for talk in layer.talks),
        window=Windows(
            forward=layer.passes.forward,
            backward=layer.passes.backward + again,
            head=head.forward + head.backward,
        ),
        talking=(forward, backward),
    )


@lru_cache(maxsize=1024)
def _kinds(
    shape: ModelShape, pp: int, spec: PipelineSpec, tokens: int
) -> tuple[tuple[StageLayers, int], ...]:
    """Ranks along pp as far as they differ, and how many there are of each kind."""
    return tuple(Counter(layers_along_pp(shape, pp, spec, tokens)).items())


def _layer(machine: Machine, shape: ModelShape, part: Slice, how: How) -> Layer:
    passes = layer_passes(machine, shape, part)
    talks: tuple[AxisTraffic, ...] = tensor_traffic(machine, shape, part) if part.tp > 1 else ()
    merging = 0.0
    if part.cp > 1:
        more, merging = context_traffic(machine, shape, part)
        talks += more
    full = how.checkpointing in ("full", "every_k")
    return Layer(
        passes=passes,
        merging=merging,
        talks=talks,
        repeated=_repeated(shape, how),
        # Selective keeps products, attention and collectives: all else is done again.
        again=passes.forward + merging if full else passes.cheap,
        repeats_talk=full,
    )


def _repeated(shape: ModelShape, how: How) -> float:
    """Share of the layers that are treated (`trainer/parallel/activation.py`)."""
    if how.checkpointing == "none":
        return 0.0
    if how.checkpointing != "every_k":
        return 1.0
    return shape.num_layers // how.every / shape.num_layers


def _stage(
    machine: Machine, shape: ModelShape, part: Slice, how: How, layer: Layer, rank: StageLayers
) -> Stage:
    layers, passes = rank.layers, layer.passes
    again = layers * layer.repeated * layer.again
    compute, weights = layers * layer.compute, layers * passes.weights
    ops = layers * (passes.forward_ops * (1 + layer.repeated) + passes.backward_ops)
    ends = []
    if rank.is_first:
        ends.append(embedding_passes(machine, shape, part))
    if rank.is_last:
        ends.append(head_passes(machine, shape, part))
    for end in ends:
        compute += end.forward + end.backward
        weights += end.weights
        ops += end.forward_ops + end.backward_ops
    talk = sum(_total(layer, one, rank).exposed for one in layer.talks)
    if part.tp > 1:
        talk += 2 * len(ends) * outer_traffic(machine, shape, part).exposed
    calibration = machine.calibration
    sharded_op = part.tp > 1 and not part.compiled
    each = calibration.sharded_op_s if sharded_op else calibration.host_op_s
    host = ops * each + layers * UNIT_CALLS * calibration.unit_s * how.sharded
    return Stage(
        rank=rank,
        compute=compute,
        weights=weights,
        again=again,
        talk=talk,
        host=max(0.0, host - compute - again - talk) if machine.host_apart else 0.0,
    )


def _total(layer: Layer, talk: AxisTraffic, rank: StageLayers) -> Times:
    """Of all layers of a rank, forward, again and backward."""
    more = 1 + (layer.repeated * talk.again if layer.repeats_talk else 0.0)
    layers, there, back = rank.layers, talk.forward, talk.backward
    return Times(
        sent=layers * (there.sent * more + back.sent),
        calls=round(layers * (there.calls * more + back.calls)),
        seconds=layers * (there.seconds * more + back.seconds),
        exposed=layers * (there.exposed * more + back.exposed),
    )
