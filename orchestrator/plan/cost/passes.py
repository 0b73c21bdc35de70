"""The time of one micro batch on each rank along pp: forward and backward, with tp and cp
traffic."""

from collections import Counter
from functools import lru_cache

from msgspec import Struct

from orchestrator.contract.spec.parallel_spec import PipelineSpec
from orchestrator.contract.spec.train_spec import BY_OPERATION, STORES_ALL, Checkpointing
from orchestrator.plan.cost.dp_traffic import Windows
from orchestrator.plan.cost.layers import (
    Passes,
    Slice,
    embedding_passes,
    head_passes,
    layer_passes,
    logits_again_s,
    repeated_s,
    smaller_chunks_s,
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
from orchestrator.plan.stages import StageLayers, layers_along_pp

UNIT_CALLS = 3
"""FSDP calls per unit: two gathers and one reduction, with their hooks and copies."""


class PassOptions(Struct, frozen=True, kw_only=True):
    """The settings, besides `Slice`, that the time of a micro batch depends on."""

    checkpointing: Checkpointing
    every: int
    """The k of `every_k`."""
    pp: int
    pipeline: PipelineSpec
    even_stages: bool
    """See `Setup.even_stages`."""
    sharded: bool
    """FSDP is used; the host runs its hooks."""
    loss_chunks: int = 0
    """0: as many as the trainer takes by itself."""


class Stage(Struct, frozen=True, kw_only=True):
    """Seconds of one micro batch on one kind of rank along pp."""

    rank: StageLayers
    compute: float
    weights: float
    """Part of `compute` for gradients of weights."""
    recompute: float
    traffic: float
    """Exposed tp and cp traffic."""
    host: float
    """Seconds that the device waits for the host to start operations."""
    axes: tuple[tuple[AxisTraffic, Times], ...]
    """tp and cp traffic of all layers together."""

    @property
    def seconds(self) -> float:
        return self.compute + self.recompute + self.traffic + self.host


class MicroBatch(Struct, frozen=True, kw_only=True):
    stages: tuple[tuple[Stage, int], ...]
    """Each kind of rank, and the number of ranks of this kind."""
    slowest: Stage
    """The one whose passes take longest. With data-parallel traffic another one may be slower."""
    window: Windows
    """Computation only, without tp traffic."""
    tp_exposed: tuple[float, float]
    """Seconds of exposed tp traffic per layer, forward and backward."""


class Layer(Struct, frozen=True, kw_only=True):
    passes: Passes
    merging: float
    """Forward seconds to merge attention from the blocks of cp ranks."""
    traffic: tuple[AxisTraffic, ...]
    repeated: float
    """Share of the layers whose forward pass is recomputed."""
    recompute: float
    """Seconds to recompute one layer."""
    whole: bool
    """Recomputation repeats the whole forward pass, not some of its operations."""
    regathers: bool
    """Recomputation only repeats the gathers of tp."""

    @property
    def compute(self) -> float:
        # The backward pass merges twice: the gradients of queries and those of keys.
        return self.passes.forward + self.passes.backward + 3 * self.merging


@lru_cache(maxsize=16384)
def micro_batch(
    machine: Machine, shape: ModelShape, part: Slice, options: PassOptions
) -> MicroBatch:
    layer = _layer(machine, shape, part, options)
    kinds = _kinds(shape, options.pp, options.pipeline, part.tokens, options.even_stages)
    stages = tuple((_stage(machine, shape, part, options, layer, kind), n) for kind, n in kinds)
    slowest = max((stage for stage, _ in stages), key=lambda stage: stage.seconds)
    head = head_passes(machine, shape, part)
    recompute = layer.repeated * layer.recompute
    forward = sum(one.forward.exposed for one in layer.traffic if one.axis == "tp")
    backward = sum(one.backward.exposed for one in layer.traffic if one.axis == "tp")
    return MicroBatch(
        stages=stages,
        slowest=slowest,
        window=Windows(
            forward=layer.passes.forward,
            backward=layer.passes.backward + recompute,
            head=head.forward + head.backward,
        ),
        tp_exposed=(forward, backward),
    )


@lru_cache(maxsize=1024)
def _kinds(
    shape: ModelShape, pp: int, spec: PipelineSpec, tokens: int, even: bool
) -> tuple[tuple[StageLayers, int], ...]:
    """The kinds of ranks along pp, and the number of ranks of each kind."""
    return tuple(Counter(layers_along_pp(shape, pp, spec, tokens, even)).items())


def _layer(machine: Machine, shape: ModelShape, part: Slice, options: PassOptions) -> Layer:
    passes = layer_passes(machine, shape, part)
    traffic: tuple[AxisTraffic, ...] = tensor_traffic(machine, shape, part) if part.tp > 1 else ()
    merging = 0.0
    if part.cp > 1:
        more, merging = context_traffic(machine, shape, part)
        traffic += more
    kind = options.checkpointing
    whole = kind not in BY_OPERATION
    recompute = passes.forward + merging - (0.0 if part.repeats_last else passes.last)
    if not whole:
        recompute = passes.cheap + repeated_s(machine, shape, part, kind)
    return Layer(
        passes=passes,
        merging=merging,
        traffic=traffic,
        repeated=_repeated(shape, options),
        recompute=recompute,
        whole=whole,
        regathers=kind == "gathers",
    )


def _repeated(shape: ModelShape, options: PassOptions) -> float:
    """Share of the layers that are recomputed (`trainer/parallel/activation.py`)."""
    if options.checkpointing in STORES_ALL:
        return 0.0
    if options.checkpointing != "every_k":
        return 1.0
    return shape.num_layers // options.every / shape.num_layers


def _stage(
    machine: Machine,
    shape: ModelShape,
    part: Slice,
    options: PassOptions,
    layer: Layer,
    rank: StageLayers,
) -> Stage:
    layers, passes = rank.layers, layer.passes
    recompute = layers * layer.repeated * layer.recompute
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
    if rank.is_last:
        compute += smaller_chunks_s(machine, shape, part, options.loss_chunks)
        # The trainer then keeps no gradient of the head from the forward pass (`HeadLoss`).
        if options.pp > 1 and options.pipeline.schedule == "gpipe":
            recompute += logits_again_s(machine, shape, part)
    axes = tuple((one, _total(layer, one, rank)) for one in layer.traffic)
    traffic = sum(times.exposed for _, times in axes)
    if part.tp > 1:
        traffic += 2 * len(ends) * outer_traffic(machine, shape, part).exposed
    calibration = machine.calibration
    host = ops * calibration.host_op_s
    host += layers * UNIT_CALLS * calibration.unit_s * options.sharded
    return Stage(
        rank=rank,
        compute=compute,
        weights=weights,
        recompute=recompute,
        traffic=traffic,
        host=max(0.0, host - compute - recompute - traffic) if machine.has_device else 0.0,
        axes=axes,
    )


def _total(layer: Layer, traffic: AxisTraffic, rank: StageLayers) -> Times:
    """Sum over all layers of a rank: forward, recomputation and backward."""
    again = traffic.again if layer.whole else traffic.again_by_operation
    times = 1 + layer.repeated * again + layer.regathers * traffic.regathered
    layers, forward, backward = rank.layers, traffic.forward, traffic.backward
    return Times(
        sent=layers * (forward.sent * times + backward.sent),
        calls=round(layers * (forward.calls * times + backward.calls)),
        seconds=layers * (forward.seconds * times + backward.seconds),
        exposed=layers * (forward.exposed * times + backward.exposed),
    )
