"""A time below that of any step, for a fraction of what the step's own costs to reckon.

It has the arithmetic at the best rate, what memory bounds, what is said inside the model, and the
bubble; it leaves out recomputation, the host, weights and gradients, and the optimizer. A search
passes over most setups by it (`tests/plan/cost/test_lower_bound.py` holds it below `timeline`).
"""

from dataclasses import dataclass
from functools import lru_cache

from orchestrator.contract.spec.parallel_spec import PipelineSpec
from orchestrator.contract.spec.pipeline_spec import SPLITS_BACKWARD
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
from orchestrator.plan.cost.timeline import handed_on_bytes
from orchestrator.plan.cost.tp_cp_traffic import context_traffic, outer_traffic, tensor_traffic
from orchestrator.plan.model.shape import ModelShape


@dataclass(frozen=True, slots=True)
class LowerBound:
    """Seconds of one micro batch, forward and backward, with all that tp and cp ranks say."""

    layer: float
    layers: int
    ends: float
    """Embedding and head."""
    handed_on: float
    """Bytes that go from stage to stage."""


@lru_cache(maxsize=4096)
def lower_bound_of(machine: Machine, shape: ModelShape, part: Slice) -> LowerBound:
    merging, talks = 0.0, tensor_traffic(machine, shape, part) if part.tp > 1 else ()
    if part.cp > 1:
        more, merging = context_traffic(machine, shape, part)
        talks += more
    layer = sum(_products(machine, shape, part)) + 3 * merging
    layer += sum(attention_of(machine, shape, part)) + sum(cheap_of(machine, shape, part))
    layer += sum(talk.forward.exposed + talk.backward.exposed for talk in talks)
    embedding = embedding_passes(machine, shape, part)
    ends = embedding.forward + embedding.backward + sum(head_cheap(machine, shape, part))
    ends += sum(_head(machine, shape, part)) + 4 * outer_traffic(machine, shape, part).exposed
    return LowerBound(layer, shape.num_layers, ends, handed_on_bytes(shape, part))


def lower_bound_s(
    machine: Machine,
    least: LowerBound,
    pp: int,
    stride: int,
    spec: PipelineSpec,
    micro_batches: int,
) -> float:
    """Of a step of so many micro batches; `stride` is between neighbours along pp.

    The slowest of pp ranks has the mean of all at least, and no fewer layers; a step is (m - 1 / v)
    of its micro batches and a v-th of everybody's (see `timeline`).
    """
    whole = least.layers * least.layer + least.ends
    if pp == 1:
        return micro_batches * whole
    slowest = max(whole / pp, -(-least.layers // pp) * least.layer)
    handed_on = 2 * spec.stages * machine.wire(pp, stride).send_s(least.handed_on)
    waits = (pp - 1) * handed_on / spec.stages
    if spec.schedule != SPLITS_BACKWARD:
        waits += max(0.0, whole - slowest) / spec.stages
    return micro_batches * (slowest + handed_on) + waits


def _products(machine: Machine, shape: ModelShape, part: Slice) -> list[float]:
    kind = "float8" if part.float8 else part.dtype
    return [
        alike * share * least_matmul_s(machine, 2.0 * rows * into * out, inner, kind)
        for rows, into, out, experts, share, alike in linears(shape, part)
        for inner in (into, out, *([] if part.lora else [rows // experts]))
    ]


def _head(machine: Machine, shape: ModelShape, part: Slice) -> list[float]:
    vocabulary = -(-shape.vocab_size // part.tp)
    flops = 2.0 * part.rows * shape.hidden_size * vocabulary
    inner = (shape.hidden_size, vocabulary, *([] if part.lora else [part.rows]))
    return [least_matmul_s(machine, flops, one, part.dtype) for one in inner]
