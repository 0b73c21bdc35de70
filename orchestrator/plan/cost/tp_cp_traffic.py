"""The tp and cp traffic inside the model, for one micro batch."""

from functools import lru_cache

from msgspec import Struct

from orchestrator.plan.cost.collectives import exchange_bytes, ring_gather_bytes
from orchestrator.plan.cost.groups import Group
from orchestrator.plan.cost.kernels import move_s
from orchestrator.plan.cost.layers import Slice, attention_of
from orchestrator.plan.cost.machine import Machine
from orchestrator.plan.model.shape import ModelShape
from orchestrator.plan.sizes import COMPUTE_BYTES, FLOAT32_BYTES

MERGED_BYTES = 20
"""Bytes read and written per value of the attention output to merge one block: two inputs and one
output, in float32 and in the kernel's type (`trainer/parallel/context/blocks.py`)."""


class Times(Struct, frozen=True, kw_only=True):
    """One collective in one direction, with copies before and after it."""

    sent: float = 0.0
    calls: int = 0
    seconds: float = 0.0
    exposed: float = 0.0


class AxisTraffic(Struct, frozen=True, kw_only=True):
    axis: str
    collective: str
    what: str
    group: Group
    forward: Times
    backward: Times
    again: float = 1.0
    """Share of the forward traffic that recomputation of the whole layer repeats."""
    again_by_operation: float = 0.0
    """The same for `elementwise` and `selective`, which store most results."""
    regathered: float = 0.0
    """The same for `gathers`."""


def tensor_traffic(machine: Machine, shape: ModelShape, part: Slice) -> tuple[AxisTraffic, ...]:
    """The traffic of one layer with sequence parallelism.

    The inputs of attention and MLP are gathered, and their outputs are reduce-scattered; the
    backward pass mirrors this (Korthikanti et al. 2022, section 4.2.2). In our trainer nothing
    overlaps with it (`tp_hidden` is 0).
    Recomputation does not need the layer's output, so it stops before the last reduce-scatter,
    except where `Slice.repeats_last` says otherwise. The modes that recompute by operation store
    what is reduce-scattered, but not what is gathered. Nor does `gathers`
    (`trainer/model/sequence.py`, `gather_again`).
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
            again_by_operation=by_operation,
            regathered=regathered,
        )
        for collective, again, by_operation, regathered in (
            ("all-gather", 1.0, 1.0, _regathered(shape, part)),
            ("reduce-scatter", 1.0 if part.repeats_last else 0.5, 0.0, 0.0),
        )
    )


def _regathered(shape: ModelShape, part: Slice) -> float:
    """Share of the gathered inputs whose gradients of weights need them. With LoRA an input without
    adapters is not needed."""
    if part.lora is None:
        return 1.0
    targets = set(part.lora.target_modules).intersection(name for name, _, _ in shape.linear)
    blocks = ({"q_proj", "k_proj", "v_proj"}, {"gate_proj", "up_proj"})
    return sum(bool(targets & block) for block in blocks) / len(blocks)


@lru_cache(maxsize=8192)
def outer_traffic(machine: Machine, shape: ModelShape, part: Slice) -> Times:
    """The traffic of the embedding, and equally of the head. The embedding's output is
    reduce-scattered and its gradient gathered; the head's input is gathered and its gradient
    reduce-scattered."""
    return Times() if part.tp == 1 else _of_hidden_states(machine, shape, part, 1)


def _of_hidden_states(machine: Machine, shape: ModelShape, part: Slice, calls: int) -> Times:
    """The sequence dim is behind the batch dim. So the parts of several sequences are copied to
    their places after a gather, and next to each other before a reduce-scatter
    (`trainer/model/sequence.py`)."""
    whole = part.rows * shape.hidden_size * COMPUTE_BYTES[part.dtype]
    copies_s = move_s(machine, 2 * whole, 1) if part.sequences > 1 else 0.0
    seconds = calls * (machine.wire(part.tp, 1).gather_s(whole) + copies_s)
    sent = calls * ring_gather_bytes(part.tp, whole)
    exposed = seconds * (1 - machine.calibration.tp_hidden)
    return Times(sent=sent, calls=calls, seconds=seconds, exposed=exposed)


def context_traffic(
    machine: Machine, shape: ModelShape, part: Slice
) -> tuple[tuple[AxisTraffic, ...], float]:
    """The traffic of one layer, and the forward seconds to merge attention blocks."""
    match part.context:
        case "ring":
            return _ring(machine, shape, part)
        case "all_gather":
            return _gathered(machine, shape, part)
        case _:
            return _ulysses(machine, shape, part)


def _merge_s(machine: Machine, shape: ModelShape, part: Slice) -> float:
    return move_s(machine, part.rows * shape.result_size / part.tp * MERGED_BYTES, 4)


def _keys(shape: ModelShape, part: Slice) -> float:
    """Number of key and value elements of a rank's tokens."""
    return part.rows * (shape.key_size + shape.value_size) / part.tp


def _ring(
    machine: Machine, shape: ModelShape, part: Slice
) -> tuple[tuple[AxisTraffic, ...], float]:
    """Keys and values make all hops but the last, in both passes. The float32 sums of their
    gradients follow one hop behind and return to the owner (`trainer/parallel/context/ring.py`)."""
    ranks, hops = part.cp, part.cp - 1
    wire = machine.wire(ranks, part.tp)
    keys, sums = _keys(shape, part) * COMPUTE_BYTES[part.dtype], _keys(shape, part) * FLOAT32_BYTES
    hop, hop_back = wire.send_s(keys), wire.send_s(sums)
    # With zigzag chunks the blocks of all hops are equally large.
    block, block_back = (seconds / ranks for seconds in attention_of(machine, shape, part))
    traffic = AxisTraffic(
        axis="cp",
        collective="send",
        what="keys and values",
        group=wire.group,
        forward=Times(
            sent=hops * keys, calls=hops, seconds=hops * hop, exposed=hops * max(0.0, hop - block)
        ),
        backward=Times(
            sent=hops * keys + ranks * sums,
            calls=hops + ranks,
            seconds=hops * hop + ranks * hop_back,
            exposed=hops * max(0.0, hop + hop_back - block_back) + hop_back,
        ),
    )
    return (traffic,), hops * _merge_s(machine, shape, part)


def _gathered(
    machine: Machine, shape: ModelShape, part: Slice
) -> tuple[tuple[AxisTraffic, ...], float]:
    """Both passes gather all keys and values at once, overlapped with the attention to the rank's
    own keys. Their gradients are reduce-scattered in float32
    (`trainer/parallel/context/gather.py`)."""
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
    traffic = (
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
    return traffic, 2 * _merge_s(machine, shape, part)


def _ulysses(
    machine: Machine, shape: ModelShape, part: Slice
) -> tuple[tuple[AxisTraffic, ...], float]:
    """Two all-to-alls in each pass: heads for tokens, and back. With fewer kv heads than ranks,
    each rank gets a copy of a head (`trainer/parallel/context/ulysses.py`)."""
    ranks = part.cp
    wire = machine.wire(ranks, part.tp)
    copies = max(1, ranks * part.tp // shape.num_kv_heads)
    size = COMPUTE_BYTES[part.dtype]
    results = part.rows * shape.result_size / part.tp * size
    queries = part.rows * shape.query_size / part.tp * size
    into = queries + _keys(shape, part) * copies * size
    seconds = wire.exchange_s(into) + wire.exchange_s(results)
    both = Times(
        sent=exchange_bytes(ranks, into + results), calls=2, seconds=seconds, exposed=seconds
    )
    traffic = AxisTraffic(
        axis="cp",
        collective="all-to-all",
        what="queries, keys and values",
        group=wire.group,
        forward=both,
        backward=both,
    )
    # Pieces are reordered before and after each exchange.
    return (traffic,), move_s(machine, 4 * (into + results), 8)
