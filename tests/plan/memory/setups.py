"""Setups for tests of the memory model."""

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from orchestrator.contract.mesh import Mesh
from orchestrator.contract.spec.parallel_spec import PipelineSpec
from orchestrator.plan.memory.peak_memory import memory_of
from orchestrator.plan.memory.states import Units, units_of
from orchestrator.plan.model.families import shape_of
from orchestrator.plan.setup import Setup
from orchestrator.plan.stages import StageRank, stage_ranks
from tests.plan.model.models import TINY

SETUP = Setup(
    shape=shape_of(TINY),
    tokens=256,
    mesh=Mesh(),
    micro_batch_size=1,
    micro_batches=1,
    dtype="float32",
)


def setup(**changed: Any) -> Setup:
    return replace(SETUP, **changed)


def items_of(**changed: Any) -> Mapping[str, int]:
    return memory_of(setup(**changed), None).items


def ranks_of(one: Setup) -> tuple[StageRank, ...]:
    return stage_ranks(one.shape, one.mesh.pp, one.pipeline, one.micro_batches, one.tokens)


def units(one: Setup, rank: int = 0) -> Units:
    return units_of(one, ranks_of(one)[rank])


def pipeline(schedule: str) -> PipelineSpec:
    return PipelineSpec(schedule=schedule)  # type: ignore[arg-type]
