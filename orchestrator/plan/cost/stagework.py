"""What a rank computes and says to its neighbours inside a layer, for one micro batch."""

import math
from dataclasses import dataclass
from functools import lru_cache

from orchestrator.contract.parallel import PipelineSpec
from orchestrator.contract.pipeline import BACK_AND_FORTH, stages_of_rank
from orchestrator.plan.cost.collectives import exchange_bytes, ring_gather_bytes
from orchestrator.plan.cost.kernels import SIZES, move_s
from orchestrator.plan.cost.layers import (
    Passes,
    Slice,
    attention_of,
    embedding_passes,
    head_passes,
    layer_passes,
)
from orchestrator.plan.cost.machine import Machine
from orchestrator.plan.model.shape import ModelShape
from orchestrator.plan.stages import stage_cuts

FLOAT32 = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Talk:
    """Of one collective inside a layer, on a micro batch: bytes sent, calls, seconds."""

    axis: str
    collective: str
    what: str
    forward: tuple[float, int, float]
    backward: tuple[float, int, float]
    forward_exposed: float
    backward_exposed: float
    again: float = 1.0
    """Share of the forward pass's that full recomputation repeats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWork:
    """One decoder layer's part of a micro batch, with what is not hidden of its collectives."""

    passes: Passes
    talks: tuple[Talk, ...]
    forward_talk: float
    backward_talk: float
    again: dict[str, float]
    """Seconds that recomputation adds, by kind of checkpointing."""
    again_talk: float


@lru_cache(maxsize=8192)
def layer_work(machine: Machine, shape: ModelShape, part: Slice, context: str) -> LayerWork:
    passes = layer_passes(machine, shape, part)
    talks: list[Talk] = []
    extra = 0.0
    if part.tp > 1:
        talks += _tensor(machine, shape, part)
    if part.cp > 1:
        more, extra = _context(machine, shape, part, context)
        talks += more
    again_talk = sum(talk.forward_exposed * talk.again for talk in talks)
    return LayerWork(
        passes=Passes(
            forward=passes.forward + extra,
            inputs=passes.inputs + 2 * extra,
            weights=passes.weights,
            forward_ops=passes.forward_ops,
            backward_ops=passes.backward_ops,
            cheap=passes.cheap,
        ),
        talks=tuple(talks),
        forward_talk=sum(talk.forward_exposed for talk in talks),
        backward_talk=sum(talk.backward_exposed for talk in talks),
        # Selective keeps products, attention and collectives: all else is done again.
        again={"none": 0.0, "selective": passes.cheap, "full": passes.forward + extra},
        again_talk=again_talk,
    )


def _tensor(machine: Machine, shape: ModelShape, part: Slice) -> list[Talk]:
    """Sequence parallel: the inputs of attention and MLP are gathered, their results reduced and
    scattered; backward mirrors it (Korthikanti et al. 2022, section 4.2.2). Nothing hides it.
    Recomputation needs no more of the layer's result than the last one's input."""
    wire = machine.wire(part.tp, 1)
    whole = part.rows * shape.hidden_size * SIZES[part.dtype]
    each, seconds = ring_gather_bytes(part.tp, whole), wire.gather_s(whole)
    two = (2 * each, 2, 2 * seconds)
    return [
        Talk(
            axis="tp",
            collective=collective,
            what="activations",
            forward=two,
            backward=two,
            forward_exposed=two[2],
            backward_exposed=two[2],
            again=again,
        )
        for collective, again in (("all-gather", 1.0), ("reduce-scatter", 0.5))
    ]


def _context(
    machine: Machine, shape: ModelShape, part: Slice, context: str
) -> tuple[list[Talk], float]:
    """And seconds of putting blocks of attention together, forward."""
    size, rows, ranks = SIZES[part.dtype], part.rows, part.cp
    query, kv = shape.query_size / part.tp, shape.kv_size / part.tp
    wire = machine.wire(ranks, part.tp)
    attend = attention_of(machine, shape, part)
    keys = 2 * rows * kv * size
    sums = 2 * rows * kv * FLOAT32
    merge = move_s(machine, rows * query * 20)
    if context == "ring":
        hop, back = wire.send_s(keys), wire.send_s(sums)
        last = ranks - 1
        forward = last * max(0.0, hop - attend[0] / ranks)
        backward = last * max(0.0, hop + back - attend[1] / ranks) + back
        talk = Talk(
            axis="cp",
            collective="send",
            what="keys and values",
            forward=(last * keys, last, last * hop),
            backward=(last * keys + ranks * sums, last + ranks, last * hop + ranks * back),
            forward_exposed=forward,
            backward_exposed=backward,
        )
        return [talk], merge * last
    if context == "all_gather":
        gather, scatter = wire.gather_s(ranks * keys), wire.gather_s(ranks * sums)
        own = ring_gather_bytes(ranks, ranks * keys)
        return [
            Talk(
                axis="cp",
                collective="all-gather",
                what="keys and values",
                forward=(own, 1, gather),
                backward=(own, 1, gather),
                forward_exposed=max(0.0, gather - attend[0] / ranks),
                backward_exposed=max(0.0, gather - attend[1] / ranks),
            ),
            Talk(
                axis="cp",
                collective="reduce-scatter",
                what="gradients of keys and values",
                forward=(0.0, 0, 0.0),
                backward=(ring_gather_bytes(ranks, ranks * sums), 1, scatter),
                forward_exposed=0.0,
                backward_exposed=scatter,
            ),
        ], merge * 2
    copies = max(1, math.ceil(ranks * part.tp / shape.num_kv_heads))
    into = rows * (query + 2 * kv * copies) * size
    out = rows * query * size
    seconds = wire.exchange_s(into) + wire.exchange_s(out)
    both = (exchange_bytes(ranks, into + out), 2, seconds)
    talk = Talk(
        axis="cp",
        collective="all-to-all",
        what="queries, keys and values",
        forward=both,
        backward=both,
        forward_exposed=seconds,
        backward_exposed=seconds,
    )
    return [talk], move_s(machine, 2 * (into + out))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """One rank along pp: how many layers, and whether it begins or ends the model."""

    layers: int
    is_first: bool
    is_last: bool


@lru_cache(maxsize=1024)
def ranks_along(
    shape: ModelShape, pp: int, spec: PipelineSpec, tokens: int
) -> tuple[tuple[Rank, int], ...]:
    """Each kind of rank along pp, and how many there are of it."""
    if pp == 1:
        return ((Rank(layers=shape.num_layers, is_first=True, is_last=True), 1),)
    cuts = stage_cuts(shape, pp * spec.stages, tokens)
    last = 0 if spec.schedule == BACK_AND_FORTH else pp - 1
    counts: dict[Rank, int] = {}
    for rank in range(pp):
        stages = [cuts[stage] for stage in stages_of_rank(spec, pp, rank)]
        layers = sum(stop - first for first, stop in stages)
        kind = Rank(layers=layers, is_first=rank == 0, is_last=rank == last)
        counts[kind] = counts.get(kind, 0) + 1
    return tuple(counts.items())


@lru_cache(maxsize=8192)
def outer_work(
    machine: Machine, shape: ModelShape, part: Slice
) -> tuple[Passes, Passes, tuple[Talk, ...]]:
    """The embedding's and the head's passes, and what tp ranks tell each other there: rows of the
    embedding are summed and scattered, the head's input is gathered."""
    talks = []
    if part.tp > 1:
        wire = machine.wire(part.tp, 1)
        whole = part.rows * shape.hidden_size * SIZES[part.dtype]
        one = (ring_gather_bytes(part.tp, whole), 1, wire.gather_s(whole))
        for collective in ("all-gather", "reduce-scatter"):
            talks.append(
                Talk(
                    axis="tp",
                    collective=collective,
                    what="activations",
                    forward=one,
                    backward=one,
                    forward_exposed=one[2],
                    backward_exposed=one[2],
                )
            )
    return embedding_passes(machine, shape, part), head_passes(machine, shape, part), tuple(talks)
