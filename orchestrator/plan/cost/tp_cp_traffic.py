"""What tp and cp ranks say to each other inside the model, for one micro batch."""

from dataclasses import dataclass
from functools import lru_cache

from orchestrator.plan.cost.collectives import exchange_bytes, ring_gather_bytes
from orchestrator.plan.cost.groups import Group
from orchestrator.plan.cost.kernels import move_s
from orchestrator.plan.cost.layers import Slice, attention_of
from orchestrator.plan.cost.machine import Machine
from orchestrator.plan.model.shape import ModelShape
from orchestrator.plan.sizes import COMPUTE_BYTES, FLOAT32_BYTES

MERGED_BYTES = 20
"""Read and written of each value of attention's result, to let a block's answer count: both in, one
out, in float32 and in the type of the kernel's (`trainer/parallel/context/blocks.py`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """One collective in one direction."""

    sent: float = 0.0
    calls: int = 0
    seconds: float = 0.0
    exposed: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisTraffic:
    axis: str
    collective: str
    what: str
    group: Group
    forward: Times
    backward: Times
    again: float = 1.0
    """Share of the forward pass's that full recomputation repeats."""


def tensor_traffic(machine: Machine, shape: ModelShape, part: Slice) -> tuple[AxisTraffic, ...]:
    """Of one layer. Sequence parallel: the inputs of attention and of the MLP are gathered, their
    results reduced and scattered; backward mirrors it (Korthikanti et al. 2022, section 4.2.2).
    Nothing hides it. Recomputation does not need the layer's result again, so it ends before the
    last reduce-scatter.
    """
    each = _of_hidden_states(machine, shape, part, 2)
    group = machine.wire(part.tp, 1).group
    return tuple(
        AxisTraffic(
            axis="tp",
            collective=collective,
            what="activations",
            group=group,
            forward=each,
            backward=each,
            again=again,
        )
        for collective, again in (("all-gather", 1.0), ("reduce-scatter", 0.5))
    )


@lru_cache(maxsize=8192)
def outer_traffic(machine: Machine, shape: ModelShape, part: Slice) -> Times:
    """Of the embedding, whose rows are reduced and scattered, and whose gradients are gathered; and
    of the head, whose input is gathered and whose gradients are reduced and scattered: each."""
    return Times() if part.tp == 1 else _of_hidden_states(machine, shape, part, 1)


def _of_hidden_states(machine: Machine, shape: ModelShape, part: Slice, calls: int) -> Times:
    whole = part.rows * shape.hidden_size * COMPUTE_BYTES[part.dtype]
    seconds = calls * machine.wire(part.tp, 1).gather_s(whole)
    sent = calls * ring_gather_bytes(part.tp, whole)
    return Times(sent=sent, calls=calls, seconds=seconds, exposed=seconds)


def context_traffic(
    machine: Machine, shape: ModelShape, part: Slice
) -> tuple[tuple[AxisTraffic, ...], float]:
    """Of one layer; and the seconds that putting attention together takes, forward."""
    match part.context:
        case "ring":
            return _ring(machine, shape, part)
        case "all_gather":
            return _gathered(machine, shape, part)
        case _:
            return _ulysses(machine, shape, part)


def _merge_s(machine: Machine, shape: ModelShape, part: Slice) -> float:
    return move_s(machine, part.rows * shape.query_size / part.tp * MERGED_BYTES, 4)


def _keys(shape: ModelShape, part: Slice) -> float:
    """Keys and values of a rank's tokens."""
    return 2 * part.rows * shape.kv_size / part.tp


def _ring(
    machine: Machine, shape: ModelShape, part: Slice
) -> tuple[tuple[AxisTraffic, ...], float]:
    """Keys and values travel all hops but the last, twice; the sums of their gradients, float32,
    follow a hop behind and come home (`trainer/parallel/context/ring.py`)."""
    ranks, hops = part.cp, part.cp - 1
    wire = machine.wire(ranks, part.tp)
    keys, sums = _keys(shape, part) * COMPUTE_BYTES[part.dtype], _keys(shape, part) * FLOAT32_BYTES
    hop, hop_back = wire.send_s(keys), wire.send_s(sums)
    # The blocks of all hops are equally large, for the sequence is dealt out in zigzag.
    block, block_back = (seconds / ranks for seconds in attention_of(machine, shape, part))
    talk = AxisTraffic(
        axis="cp",
        collective="send",
        what="keys and values",
        group=wire.group,
        forward=Times(
            sent=hops * keys,
            calls=hops,
            seconds=hops * hop,
            exposed=hops * max(0.0, hop - block),
        ),
        backward=Times(
            sent=hops * keys + ranks * sums,
            calls=hops + ranks,
            seconds=hops * hop + ranks * hop_back,
            exposed=hops * max(0.0, hop + hop_back - block_back) + hop_back,
        ),
    )
    return (talk,), hops * _merge_s(machine, shape, part)


def _gathered(
    machine: Machine, shape: ModelShape, part: Slice
) -> tuple[tuple[AxisTraffic, ...], float]:
    """All keys and values at once, in each direction, beside the attention to a rank's own; sums of
    their gradients are scattered in float32 (`trainer/parallel/context/gather.py`)."""
    ranks = part.cp
    wire = machine.wire(ranks, part.tp)
    whole = ranks * _keys(shape, part) * COMPUTE_BYTES[part.dtype]
    sums = ranks * _keys(shape, part) * FLOAT32_BYTES
    gather, scatter = wire.gather_s(whole), wire.gather_s(sums)
    own = (seconds / ranks for seconds in attention_of(machine, shape, part))
    sent = ring_gather_bytes(ranks, whole)
    forward, backward = (
        Times(sent=sent, calls=1, seconds=gather, exposed=max(0.0, gather - meanwhile))
        for meanwhile in own
    )
    scattered = Times(
        sent=ring_gather_bytes(ranks, sums), calls=1, seconds=scatter, exposed=scatter
    )
    talks = (
        AxisTraffic(
            axis="cp",
            collective="all-gather",
            what="keys and values",
            group=wire.group,
            forward=forward,
            backward=backward,
        ),
        AxisTraffic(
            axis="cp",
            collective="reduce-scatter",
            what="gradients of keys and values",
            group=wire.group,
            forward=Times(),
            backward=scattered,
        ),
    )
    return talks, 2 * _merge_s(machine, shape, part)


def _ulysses(
    machine: Machine, shape: ModelShape, part: Slice
) -> tuple[tuple[AxisTraffic, ...], float]:
    """Heads for tokens and back, in each direction; with fewer kv heads than ranks, each gets a
    copy (`trainer/parallel/context/ulysses.py`)."""
    ranks = part.cp
    wire = machine.wire(ranks, part.tp)
    copies = max(1, ranks * part.tp // shape.num_kv_heads)
    size = COMPUTE_BYTES[part.dtype]
    results = part.rows * shape.query_size / part.tp * size
    into = results + _keys(shape, part) * copies * size
    seconds = wire.exchange_s(into) + wire.exchange_s(results)
    both = Times(
        sent=exchange_bytes(ranks, into + results), calls=2, seconds=seconds, exposed=seconds
    )
    talk = AxisTraffic(
        axis="cp",
        collective="all-to-all",
        what="queries, keys and values",
        group=wire.group,
        forward=both,
        backward=both,
    )
    # Pieces are put in order before and behind each exchange.
    return (talk,), move_s(machine, 4 * (into + results), 8)
