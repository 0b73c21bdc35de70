"""The lower bound with which a search skips setups never exceeds the step time of a setup."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.contract.mesh import Mesh
from orchestrator.contract.spec.parallel_spec import PipelineSpec
from orchestrator.plan.cost.lower_bound import lower_bound_of, lower_bound_s
from orchestrator.plan.cost.machine import machine_of
from orchestrator.plan.cost.timeline import passes_s, slice_of, timeline
from orchestrator.plan.search.rules import SCHEDULES
from orchestrator.plan.setup import Setup
from tests.plan.cost.setups import LLAMA_8B, LLAMA_70B, QWEN3_4B, fabric, setup


def least_s(one: Setup, profile: str) -> float:
    mesh = one.mesh
    machine = machine_of(fabric(profile, 64))
    least = lower_bound_of(machine, one.shape, slice_of(one))
    stride = mesh.world_size // mesh.pp
    return lower_bound_s(machine, least, mesh.pp, stride, one.pipeline, one.micro_batches)


def seconds(one: Setup, profile: str) -> float:
    return sum(timeline(one, machine_of(fabric(profile, 64))).parts.values())


degrees = st.sampled_from([1, 2, 4])
setups: st.SearchStrategy[Any] = st.builds(
    setup,
    shape=st.sampled_from([LLAMA_8B, LLAMA_70B, QWEN3_4B]),
    tokens=st.sampled_from([256, 4096, 8192]),
    mesh=st.builds(
        Mesh, pp=degrees, dp_replicate=degrees, dp_shard=degrees, cp=degrees, tp=degrees
    ),
    micro_batch_size=st.integers(1, 4),
    micro_batches=st.sampled_from([4, 8, 16]),
    checkpointing=st.sampled_from(["none", "full"]),
    context=st.sampled_from(["ring", "ulysses", "all_gather"]),
    pipeline=st.sampled_from([PipelineSpec(schedule=schedule) for schedule in SCHEDULES]),
    compile=st.booleans(),
    loss_chunks=st.sampled_from(["auto", 8, 64]),
)
profiles = st.sampled_from(["h100-sxm-80gb", "rtx4090-24gb", "cpu"])


@settings(deadline=None, max_examples=50)
@given(setups, profiles)
def test_the_bound_is_below_the_passes_and_the_passes_are_below_the_step(
    one: Setup, profile: str
) -> None:
    passes = passes_s(one, machine_of(fabric(profile, 64)))
    assert least_s(one, profile) <= passes * (1 + 1e-9)
    assert passes <= seconds(one, profile) * (1 + 1e-9)


@pytest.mark.parametrize("pp", [1, 4])
def test_the_bound_is_close_if_a_step_is_mostly_computation(pp: int) -> None:
    one = setup(mesh=Mesh(pp=pp, dp_shard=2), micro_batches=32)
    assert least_s(one, "h100-sxm-80gb") > 0.85 * seconds(one, "h100-sxm-80gb")
