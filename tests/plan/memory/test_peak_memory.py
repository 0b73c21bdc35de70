"""Peak memory is the largest allocation at any time on the fullest rank."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from orchestrator.contract.mesh import Mesh
from orchestrator.contract.plan import RESERVE
from orchestrator.inventory.profile import Fabric
from orchestrator.inventory.profiles import load_profile
from orchestrator.plan.memory.peak_memory import memories_of, memory_of, min_peak_bytes
from orchestrator.plan.memory.peak_range import basis_of
from orchestrator.plan.memory.states import states_of, update_bytes
from orchestrator.plan.model.families import shape_of
from orchestrator.plan.model.shape import layer_sizes
from orchestrator.plan.setup import Setup
from tests.plan.memory.setups import SETUP, items_of, pipeline, ranks_of, setup, units
from tests.plan.model.models import LLAMA3_8B
from trainer.optimizer import CHUNK

powers = st.sampled_from([1, 2, 4])
setups = st.builds(
    replace,
    st.just(SETUP),
    mesh=st.builds(Mesh, pp=powers, dp_replicate=powers, dp_shard=powers, cp=powers, tp=powers),
    micro_batch_size=powers,
    micro_batches=st.sampled_from([4, 8]),
    checkpointing=st.sampled_from(["none", "elementwise", "selective", "full", "every_k"]),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    reshard=st.sampled_from([True, False, 2]),
    backward_prefetch=st.sampled_from([0, 1, 3]),
    cpu_offload=st.booleans(),
    pipeline=st.sampled_from(["gpipe", "1f1b"]).map(pipeline),
)


@settings(deadline=None, max_examples=50)
@given(setups)
def test_no_item_exceeds_the_peak_and_the_sum_of_items_is_at_least_the_peak(one: Setup) -> None:
    memory = memory_of(one, None)
    assert max(memory.items.values()) <= memory.peak_bytes <= sum(memory.items.values())
    assert all(size >= 0 for size in memory.items.values())
    assert min_peak_bytes(one) <= memory.peak_bytes


@settings(deadline=None, max_examples=50)
@given(setups)
def test_a_larger_micro_batch_or_a_longer_sequence_never_needs_less(one: Setup) -> None:
    peak = memory_of(one, None).peak_bytes
    assert (
        memory_of(replace(one, micro_batch_size=one.micro_batch_size + 1), None).peak_bytes > peak
    )
    assert memory_of(replace(one, tokens=2 * one.tokens), None).peak_bytes > peak


@settings(deadline=None, max_examples=50)
@given(setups)
def test_more_shards_never_need_more(one: Setup) -> None:
    wider = replace(one, mesh=replace(one.mesh, dp_shard=2 * one.mesh.dp_shard))
    few, many = (memory_of(each, None) for each in (one, wider))
    if one.mesh.world_size > one.mesh.pp or one.dtype == "bfloat16":
        assert many.items["parameters"] <= few.items["parameters"]
        assert many.items["optimizer"] <= few.items["optimizer"]


def test_weights_that_stay_gathered_need_memory_for_the_whole_model() -> None:
    mesh, shape = Mesh(dp_shard=4), SETUP.shape
    kept, parts, freed = (
        items_of(mesh=mesh, reshard=reshard)["gathered"] for reshard in (False, 2, True)
    )
    assert freed < parts < kept
    assert kept == 4 * shape.parameters
    deep = items_of(mesh=mesh, backward_prefetch=2)["gathered"]
    assert deep - freed == 4 * sum(layer_sizes(shape))


def test_buckets_replace_the_gradients_that_they_average() -> None:
    one, many = (items_of(mesh=Mesh(dp_replicate=n), data="ddp") for n in (1, 4))
    assert many["gradients"] == one["gradients"] == 4 * SETUP.shape.parameters
    assert many["temporary"] == one["temporary"]
    assert many["gathered"] == 0
    zero1 = items_of(mesh=Mesh(dp_replicate=4), data="zero1")
    # This rank's rows of the averages are there besides the buffers that are averaged.
    assert zero1["gradients"] == 5 * SETUP.shape.parameters
    narrow = items_of(mesh=Mesh(dp_replicate=4), data="ddp", reduce_dtype="bfloat16")
    assert narrow["gradients"] == many["gradients"]


def test_bfloat16_moments_take_half_and_an_update_makes_few_of_them_wide() -> None:
    wide, narrow = (
        items_of(mesh=Mesh(dp_shard=4), state_dtype=kind)["optimizer"]
        for kind in ("float32", "bfloat16")
    )
    assert narrow == wide / 2
    large = setup(shape=shape_of(LLAMA3_8B), mesh=Mesh(dp_shard=8), state_dtype="bfloat16")
    states = states_of(large, ranks_of(large)[0], units(large))
    assert update_bytes(large, states) == 8 * CHUNK
    assert update_bytes(replace(large, state_dtype="float32"), states) == 0


def test_the_fullest_rank_of_a_pipeline_is_reported() -> None:
    """The first rank keeps the most micro batches. The last rank has the logits."""
    for words, stage in ((256, "pp stage 0"), (10_000_000, "pp stage 3")):
        shape = shape_of({**LLAMA3_8B, "vocab_size": words})
        four = setup(
            shape=shape, mesh=Mesh(pp=4), micro_batches=16, micro_batch_size=8, loss_chunks=1
        )
        memory = memory_of(four, None)
        assert memory.worst_rank == stage
        assert bool(memory.items["logits"]) == (stage == "pp stage 3")
    assert memory_of(SETUP, None).worst_rank == "every rank"


def test_head_and_embedding_of_a_large_vocabulary_are_separate_units() -> None:
    large = setup(shape=shape_of(LLAMA3_8B), mesh=Mesh(dp_shard=8))
    own = units(large)
    assert own.embedding.whole == 128256 * 4096
    assert own.head.whole == 128256 * 4096 + 4096
    assert own.root.whole == 0
    small = units(setup(mesh=Mesh(dp_shard=8)))
    assert small.embedding.whole == small.head.whole == 0
    assert small.root.whole == 2 * 256 * 128 + 128
    assert small.late_root.whole == 256 * 128 + 128


@pytest.mark.parametrize(("name", "extra"), [("cpu", False), ("h100-sxm-80gb", True)])
def test_only_a_gpu_has_memory_for_more_than_tensors(name: str, extra: bool) -> None:
    profile: Any = load_profile(name)
    fabric = Fabric(profile=profile, hosts=1, devices_per_host=8)
    eight = setup(mesh=Mesh(dp_shard=8))
    bare, there = memory_of(eight, None), memory_of(eight, fabric)
    assert there.device_bytes == profile.memory_bytes
    assert bare.device_bytes is None
    reserved = sum(there.items.get(item, 0) for item in RESERVE)
    assert there.peak_bytes == bare.peak_bytes + reserved
    assert bool(reserved) == extra


def test_the_fullest_rank_is_the_fullest_of_all_along_pp() -> None:
    for schedule in ("gpipe", "1f1b", "interleaved_1f1b", "zbv"):
        one = setup(mesh=Mesh(pp=2, dp_shard=2), micro_batches=4, pipeline=pipeline(schedule))
        along = memories_of(one, None)
        assert [memory.worst_rank for memory in along] == ["pp stage 0", "pp stage 1"]
        fullest = memory_of(one, None)
        assert fullest in along
        assert fullest.peak_bytes == max(memory.peak_bytes for memory in along)


def test_the_range_says_that_a_family_which_the_trainer_lacks_was_never_traced() -> None:
    olmoe = setup(shape=shape_of({"model_type": "olmoe"}), tokens=64)
    assert basis_of(olmoe) == f"{basis_of(SETUP)}, none of this family"
