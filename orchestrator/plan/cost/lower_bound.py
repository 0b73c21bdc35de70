"""A lower bound of the step time that is much cheaper to compute than `timeline`.

It counts arithmetic at the best rate, memory-bound operations, tp and cp traffic, and the bubble.
It ignores recomputation, the host, data-parallel traffic and the optimizer. The search uses it to
skip most setups. `tests/plan/cost/test_lower_bound.py` checks that it never exceeds `timeline`.
"""

from functools import lru_cache

from msgspec import Struct

from orchestrator.contract.spec.parallel_spec import PipelineSpec
from orchestrator.contract.spec.pipeline_spec import SPLITS_BACKWARD
from orchestrator.plan.cost.dp_traffic import hidden_along_pp
from orchestrator.plan.cost.kernels import least_matmul_s
from orchestrator.plan.cost.layers import (
    Slice,
    attention_of,
    cheap_of,
    embedding_passes,
    head_cheap,
    linears,
)
from orchestrator.plan.cost.machine import Machine
from orchestrator.plan.cost.timeline import stage_output_bytes
from orchestrator.plan.cost.tp_cp_traffic import context_traffic, outer_traffic, tensor_traffic
from orchestrator.plan.model.shape import ModelShape


class LowerBound(Struct, frozen=True):
    """Seconds of one micro batch, forward and backward, with tp and cp traffic."""

    layer: float
    layers: int
    ends: float
    """Embedding and head."""
    stage_output: float
    """Bytes that a stage sends to the next one."""


@lru_cache(maxsize=4096)
def lower_bound_of(machine: Machine, shape: ModelShape, part: Slice) -> LowerBound:
    merging, traffic = 0.0, tensor_traffic(machine, shape, part) if part.tp > 1 else ()
    if part.cp > 1:
        more, merging = context_traffic(machine, shape, part)
        traffic += more
    layer = sum(_products(machine, shape, part)) + 3 * merging
    layer += sum(attention_of(machine, shape, part)) + sum(cheap_of(machine, shape, part))
    layer += sum(one.forward.exposed + one.backward.exposed for one in traffic)
    embedding = embedding_passes(machine, shape, part)
    ends = embedding.forward + embedding.backward + sum(head_cheap(machine, shape, part))
    ends += sum(_head(machine, shape, part)) + 4 * outer_traffic(machine, shape, part).exposed
    return LowerBound(layer, shape.num_layers, ends, stage_output_bytes(shape, part))


def lower_bound_s(
    machine: Machine,
    least: LowerBound,
    pp: int,
    stride: int,
    spec: PipelineSpec,
    micro_batches: int,
) -> float:
    """Seconds of a step; `stride` is the distance in ranks between neighbours along pp.

    The slowest pp rank takes at least the mean of all ranks, and has at least the mean number of
    layers. A step takes m of its micro batches plus the bubble (see `timeline`).
    """
    whole = least.layers * least.layer + least.ends
    if pp == 1:
        return micro_batches * whole
    slowest = max(whole / pp, -(-least.layers // pp) * least.layer)
    sends_s = 2 * spec.stages * machine.wire(pp, stride).send_s(least.stage_output)
    sends_s *= 1 - hidden_along_pp(spec, machine)
    bubble = (pp - 1) * sends_s / spec.stages
    # With zero bubble schedules, weight gradients may fill all other gaps.
    if spec.schedule != SPLITS_BACKWARD:
        bubble += max(0.0, whole - slowest) / spec.stages
    return micro_batches * (slowest + sends_s) + bubble


def _products(machine: Machine, shape: ModelShape, part: Slice) -> list[float]:
    kind = "float8" if part.float8 else part.dtype
    return [
        alike * share * least_matmul_s(machine, 2.0 * rows * into * out, inner, kind)
        for rows, into, out, experts, share, _, alike in linears(shape, part)
        for inner in (into, out, *([] if part.lora else [rows // experts]))
    ]


def _head(machine: Machine, shape: ModelShape, part: Slice) -> list[float]:
    vocabulary = -(-shape.vocab_size // part.tp)
    flops = 2.0 * part.rows * shape.hidden_size * vocabulary
    inner = (shape.hidden_size, vocabulary, *([] if part.lora else [part.rows]))
    return [least_matmul_s(machine, flops, one, part.dtype) for one in inner]
