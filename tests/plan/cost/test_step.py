"""Step times follow known facts and laws. `tests/plan/test_accuracy.py` compares them with
published runs."""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from orchestrator.contract.devices import PROFILE_NAMES
from orchestrator.contract.mesh import Mesh
from orchestrator.contract.spec.model_presets import PRESETS
from orchestrator.contract.spec.model_spec import LoraSpec
from orchestrator.contract.spec.parallel_spec import PipelineSpec
from orchestrator.inventory.profile import Fabric
from orchestrator.inventory.profiles import load_profile
from orchestrator.plan.cost.step import step_time
from orchestrator.plan.cost.traffic import traffic_of
from orchestrator.plan.model.families import shape_of
from orchestrator.plan.model.flops import flops_per_token
from orchestrator.plan.setup import Setup
from orchestrator.plan.stages import bubble
from tests.plan.cost.setups import H100, LLAMA_8B, LLAMA_70B, QWEN3_4B, fabric, setup


def test_utilisation_is_model_flops_over_the_peak() -> None:
    one = step_time(setup(), H100)
    by_hand = flops_per_token(LLAMA_8B, 8192) * 8192 / one.step_s / 989.4e12
    assert one.mfu == pytest.approx(by_hand)
    assert one.tokens_per_second_per_device == pytest.approx(8192 / one.step_s)


def bubble_share(micro_batches: int, spec: PipelineSpec, pp: int = 4) -> float:
    """The bubble's share of a step's computation. The head costs nothing, so stages are equal."""
    shape = replace(LLAMA_8B, vocab_size=16)
    one = setup(
        shape=shape,
        mesh=Mesh(pp=pp, dp_shard=1),
        micro_batches=micro_batches,
        pipeline=spec,
        compile=True,
    )
    parts = step_time(one, fabric(hosts=pp)).parts
    busy = parts["compute"] + parts["communication"]
    return parts["bubble"] / (parts["bubble"] + busy)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved_1f1b"])
@pytest.mark.parametrize("micro_batches", [4, 8, 32])
def test_the_bubble_is_the_published_one_of_the_schedule(schedule: Any, micro_batches: int) -> None:
    spec = PipelineSpec(schedule=schedule)
    assert bubble_share(micro_batches, spec) == pytest.approx(
        bubble(spec, 4, micro_batches), rel=0.02
    )


def test_four_stages_wait_for_8_6_per_cent_of_32_micro_batches() -> None:
    """(pp - 1) / (pp + m - 1) = 3 / 35."""
    assert bubble(PipelineSpec(), 4, 32) == pytest.approx(0.0857, abs=1e-4)
    assert bubble_share(32, PipelineSpec()) == pytest.approx(0.086, abs=0.002)


def test_the_zero_bubble_schedule_has_the_shortest_step() -> None:
    short = bubble_share(8, PipelineSpec(schedule="zbv"))
    assert (
        short
        < bubble_share(8, PipelineSpec(schedule="interleaved_1f1b"))
        < bubble_share(8, PipelineSpec())
    )


def test_gpipe_computes_the_logits_of_each_micro_batch_twice() -> None:
    def parts(micro_batches: int, schedule: Any) -> Mapping[str, float]:
        spec = PipelineSpec(schedule=schedule)
        mesh = Mesh(pp=2, dp_shard=4)
        one = setup(mesh=mesh, micro_batches=micro_batches, pipeline=spec)
        return step_time(one, H100).parts

    assert "recompute" not in parts(8, "1f1b")
    again = parts(8, "gpipe")["recompute"]
    # One product of 8192 tokens with the head takes at least as long as at the peak.
    product = 2 * 8192 * LLAMA_8B.vocab_size * LLAMA_8B.hidden_size
    assert again > 8 * product / H100.profile.flops["bfloat16"]
    assert parts(16, "gpipe")["recompute"] == pytest.approx(2 * again)


def test_full_recomputation_costs_a_quarter_more_and_elementwise_little() -> None:
    """A backward pass is twice a forward pass, so one more forward pass would be a third. But no
    gradient needs the result of a layer's last product, so recomputation stops before it.
    `selective` repeats 3 of the other 6 products."""
    base = step_time(setup(compile=True), H100).parts["compute"]
    full = step_time(setup(compile=True, checkpointing="full"), H100).parts["recompute"]
    elementwise, selective = (
        step_time(setup(compile=True, checkpointing=kind), H100).parts["recompute"]
        for kind in ("elementwise", "selective")
    )
    # The head and the loss are not recomputed.
    assert 0.22 < full / base < 0.27
    assert elementwise < full / 4
    assert elementwise + 0.3 * full < selective < 0.7 * full
    every = step_time(setup(compile=True, checkpointing="every_k", checkpoint_every=4), H100).parts[
        "recompute"
    ]
    assert every == pytest.approx(full / 4)


def test_full_recomputation_of_compiled_layers_under_tp_repeats_the_last_product_too() -> None:
    """`test_dtensor_fault.py` counts the trainer's reduce-scatters."""
    ours = setup(compile=True, checkpointing="full", mesh=Mesh(dp_shard=1, tp=8))
    theirs = replace(ours, compiles_recomputation=True)

    def recompute(one: Setup) -> float:
        return step_time(one, H100).parts["recompute"]

    shape = ours.shape
    product = 2 * 8192 * shape.hidden_size * shape.intermediate_size / 8 * shape.num_layers
    assert recompute(ours) - recompute(theirs) > product / H100.profile.flops["bfloat16"]
    assert recompute(ours) < 1.35 * recompute(theirs)
    stored = replace(ours, checkpointing="selective")
    assert recompute(stored) == recompute(replace(stored, compiles_recomputation=True))


def two_devices(base: Fabric, bytes_per_s: float | None = None) -> Fabric:
    profile = base.profile
    if bytes_per_s is not None:
        slow = replace(profile.intra_host, bytes_per_s=bytes_per_s)
        profile = replace(profile, intra_host=slow)
    return Fabric(profile=profile, hosts=1, devices_per_host=2)


def fsdp_and_tensor_parallel(tokens: int) -> tuple[Setup, Setup]:
    """A 4B model in bfloat16 on two devices, two sequences a step, with FSDP and with TP."""
    common: dict[str, Any] = {"shape": QWEN3_4B, "tokens": tokens, "reduce_dtype": "bfloat16"}
    return (
        setup(mesh=Mesh(dp_shard=2), micro_batches=1, **common),
        setup(mesh=Mesh(tp=2), micro_batches=2, **common),
    )


def test_an_all_reduce_of_140_gb_at_50_gb_per_s_takes_at_least_5_6_s() -> None:
    """2 (K - 1) / K of the gradients at the nominal rate; the planned time is longer."""
    apart = Fabric(profile=H100.profile, hosts=1024, devices_per_host=1)
    ddp = setup(shape=LLAMA_70B, mesh=Mesh(dp_replicate=1024), data="ddp", reduce_dtype="bfloat16")
    (reduced,) = traffic_of(ddp, apart)
    assert reduced.ideal_seconds == pytest.approx(5.6, abs=0.05)
    assert reduced.ideal_seconds < reduced.seconds < 1.5 * reduced.ideal_seconds


def test_no_traffic_is_faster_than_its_links() -> None:
    split = setup(mesh=Mesh(pp=2, dp_replicate=2, dp_shard=4, cp=2, tp=2), micro_batches=4)
    for one in traffic_of(split, fabric(hosts=8)):
        assert 0 < one.ideal_seconds < one.seconds


def traffic_s(one: Setup, known: Fabric) -> float:
    return sum(traffic.seconds for traffic in traffic_of(one, known))


def test_tensor_parallel_is_6_times_as_fast_as_fsdp_on_a_slow_link() -> None:
    """The source reports 43 s and 7 s per step, but neither the batch nor the bandwidth.

    Two sequences of 1024 tokens and a link of 0.8 GB/s (PCIe 3.0 x1) give 42 s and 7 s. Collectives
    through host memory reach 0.28 of the link's bandwidth. The ratio of the two times is the ratio
    of the bytes, so it does not depend on the link.
    """
    fsdp, tensor = fsdp_and_tensor_parallel(1024)
    slow = two_devices(fabric("rtx4090-24gb"), 0.8e9)
    assert step_time(fsdp, slow).step_s == pytest.approx(43, rel=0.1)
    assert step_time(tensor, slow).step_s == pytest.approx(7, rel=0.1)
    assert step_time(fsdp, slow).step_s / step_time(tensor, slow).step_s == pytest.approx(
        6, rel=0.1
    )
    full_speed = two_devices(fabric("rtx4090-24gb"))
    for known in (slow, full_speed):
        assert traffic_s(fsdp, known) / traffic_s(tensor, known) == pytest.approx(6, rel=0.15)
    assert step_time(fsdp, full_speed).step_s > 1.5 * step_time(tensor, full_speed).step_s


@pytest.mark.parametrize("tokens", [1024, 4096, 8192])
def test_fsdp_beats_tensor_parallel_on_nvlink(tokens: int) -> None:
    fsdp, tensor = fsdp_and_tensor_parallel(tokens)
    known = two_devices(H100)
    assert step_time(fsdp, known).step_s < step_time(tensor, known).step_s


def test_tensor_parallel_across_hosts_is_slower() -> None:
    two = fabric(hosts=2)
    common: dict[str, Any] = {"shape": LLAMA_70B, "checkpointing": "full", "compile": True}
    inside = setup(mesh=Mesh(dp_shard=2, tp=8), micro_batches=8, **common)
    across = setup(mesh=Mesh(tp=16), micro_batches=16, **common)
    assert step_time(across, two).step_s > 1.2 * step_time(inside, two).step_s
    # The difference is larger if all devices of a host share one adapter.
    profile = replace(two.profile, inter_host=replace(two.profile.inter_host, bytes_per_s=50e9 / 8))
    poor = replace(two, profile=profile)
    assert step_time(across, poor).step_s > 1.5 * step_time(inside, poor).step_s


def test_compiled_layers_and_float8_are_faster() -> None:
    times = [
        step_time(setup(**how), H100).step_s
        for how in ({}, {"compile": True}, {"compile": True, "float8": True})
    ]
    assert times[0] > times[1] > times[2]


def test_a_pipeline_whose_last_stage_also_has_the_head_is_slower() -> None:
    """Megatron's stages have as many layers each."""
    one = setup(mesh=Mesh(pp=8), micro_batches=64)
    balanced, even = (
        step_time(replace(one, even_stages=even), H100).step_s for even in (False, True)
    )
    assert 1.15 * balanced < even < 1.4 * balanced


def test_a_pipeline_waits_for_the_stage_with_the_longest_step_with_its_traffic() -> None:
    """Of Llama 3 8B the first of two stages has the embedding and 17 layers. The last one computes
    longer, because it has the head, but on slow links the weights of the first one take longer."""
    one = setup(mesh=Mesh(pp=2, dp_shard=16), micro_batches=4, tokens=2048)
    rows = traffic_of(one, fabric("l40s-48gb", hosts=4))
    sent = sum(row.bytes_per_step for row in rows if row.what == "gradients")
    layer = (LLAMA_8B.parameters - LLAMA_8B.outer_parameters) / LLAMA_8B.num_layers
    weights = 17 * layer + LLAMA_8B.vocabulary_parameters
    assert sent == pytest.approx(4 * weights * 15 / 16, rel=1e-3)


@pytest.mark.parametrize("stages", [1, 8])
def test_only_an_interleaved_pipeline_hides_its_sends_and_reductions(stages: int) -> None:
    spec = PipelineSpec(
        schedule="interleaved_1f1b" if stages > 1 else "1f1b", stages_per_rank=stages
    )
    one = setup(
        shape=LLAMA_70B,
        mesh=Mesh(pp=8, dp_shard=4, tp=8),
        micro_batches=16,
        reshard=False,
        pipeline=spec,
    )
    overrides = {"calibration": {"pp_hidden": 1, "pp_regathers": False}}
    torch = fabric(hosts=32)
    megatron = replace(torch, profile=load_profile("h100-sxm-80gb", overrides, "a test"))
    shown, hidden = (step_time(one, on).parts["communication"] for on in (torch, megatron))
    sends = [flow for flow in traffic_of(one, megatron) if flow.collective == "send"]
    assert all((flow.exposed_seconds == 0) == (stages > 1) for flow in sends)
    assert (hidden < shown) == (stages > 1)


def test_offloading_the_optimizer_is_slow() -> None:
    there, away = setup(), setup(cpu_offload=True)
    assert step_time(away, H100).parts["optimizer"] > 10 * step_time(there, H100).parts["optimizer"]


def test_tiny_layers_are_bound_by_kernel_launches() -> None:
    tiny = replace(LLAMA_8B, hidden_size=256, intermediate_size=512, num_heads=4, head_dim=64)
    parts = step_time(setup(shape=tiny, tokens=256), H100).parts
    assert parts["host"] > parts["compute"]
    assert "host" not in step_time(setup(), H100).parts


def test_small_matrices_are_less_efficient() -> None:
    """The same number of tokens with matrices of an eighth of the size."""
    whole = step_time(setup(compile=True, mesh=Mesh()), H100).parts["compute"]
    eighth = step_time(setup(compile=True, mesh=Mesh(tp=8)), H100).parts["compute"]
    assert 1 / 8 < eighth / whole < 1 / 6


def test_attention_inside_short_documents_takes_less_time() -> None:
    """The scores of a sequence are the only part that grows with its square."""

    def seconds(tokens: int, document: int | None) -> float:
        return step_time(setup(tokens=tokens, document_tokens=document), H100).parts["compute"]

    long = 131_072
    whole, halves, short = (seconds(long, document) for document in (None, long // 2, 8192))
    assert seconds(long, 2 * long) == whole, "a document cannot be longer than its sequence"
    assert short < halves < whole
    # As much as 16 sequences of 8192 tokens that a rank computes one by one.
    alone = step_time(setup(micro_batches=16), H100).parts["compute"]
    assert 0.9 * alone < short < 1.1 * alone


def test_utilisation_counts_no_scores_between_documents() -> None:
    """The whole sequence would give twice the peak."""
    found = step_time(setup(tokens=131_072, document_tokens=1000), H100)
    assert 0.3 < found.mfu < 0.6


def test_frozen_weights_need_less_work() -> None:
    lora = setup(lora=LoraSpec(rank=8), compile=True)
    assert step_time(lora, H100).step_s < 0.85 * step_time(setup(compile=True), H100).step_s


def test_a_cpu_is_slow_and_its_speed_is_marked_as_a_guess() -> None:
    tiny = shape_of(PRESETS["llama-tiny"])
    one = setup(shape=tiny, tokens=128, mesh=Mesh(dp_shard=2), dtype="float32")
    found = step_time(one, fabric("cpu", devices=2))
    assert 1e-3 < found.step_s < 10
    assert "guesses" in found.confidence
    assert found.tokens_per_second_per_device_range is not None


def test_a_step_waits_longer_for_the_slowest_of_more_hosts() -> None:
    waits = []
    for hosts in (1, 8, 128):
        one = setup(mesh=Mesh(dp_replicate=hosts, dp_shard=8))
        parts = step_time(one, fabric(hosts=hosts)).parts
        waits.append(parts.get("stragglers", 0) / parts["compute"])
    assert waits[0] == 0
    assert 0 < waits[1] < waits[2] < 2 * waits[1]


powers = st.sampled_from([1, 2, 4, 8])
setups = st.builds(
    lambda pp, replicate, shard, cp, tp, micro, kind, context, schedule, compiled: setup(
        mesh=Mesh(pp=pp, dp_replicate=replicate, dp_shard=shard, cp=cp, tp=tp),
        micro_batch_size=micro,
        micro_batches=2 * pp,
        checkpointing=kind,
        context=context,
        pipeline=PipelineSpec(schedule=schedule),
        compile=compiled,
    ),
    powers,
    powers,
    powers,
    powers,
    powers,
    st.sampled_from([1, 2, 4]),
    st.sampled_from(["none", "elementwise", "selective", "full", "every_k"]),
    st.sampled_from(["ring", "ulysses", "all_gather"]),
    st.sampled_from(["gpipe", "1f1b", "interleaved_1f1b", "zbv"]),
    st.booleans(),
)


def around(one: Setup, profile: str = "h100-sxm-80gb") -> Fabric:
    return fabric(profile, hosts=max(1, one.mesh.world_size // 8))


@settings(deadline=None, max_examples=50)
@given(one=setups, profile=st.sampled_from(PROFILE_NAMES))
def test_parts_add_up_to_the_step_and_no_step_exceeds_the_peak(one: Setup, profile: str) -> None:
    found = step_time(one, around(one, profile))
    assert found.step_s == pytest.approx(sum(found.parts.values()))
    assert all(seconds > 0 for seconds in found.parts.values())
    assert 0 < found.mfu < 1


@settings(deadline=None, max_examples=50)
@given(one=setups, faster=st.sampled_from(["intra_host", "inter_host", "memory"]))
def test_a_faster_machine_is_not_slower(one: Setup, faster: str) -> None:
    known = around(one)
    profile = known.profile
    if faster == "memory":
        better = replace(profile, memory_bytes_per_s=2 * profile.memory_bytes_per_s)
    else:
        link = getattr(profile, faster)
        better = replace(profile, **{faster: replace(link, bytes_per_s=2 * link.bytes_per_s)})
    after = step_time(one, replace(known, profile=better)).step_s
    # With less computation to overlap, more communication is exposed, but never more than the
    # computation saves. How the host's delays split over the passes is a rule of thumb.
    assert after <= step_time(one, known).step_s * 1.005


@settings(deadline=None, max_examples=50)
@given(one=setups)
def test_more_micro_batches_take_longer_but_no_longer_per_sequence(one: Setup) -> None:
    known = around(one)
    times = [
        step_time(replace(one, micro_batches=one.micro_batches * times), known)
        for times in (1, 2, 4)
    ]
    for fewer, more in pairwise(times):
        assert fewer.step_s < more.step_s
        assert more.mfu >= fewer.mfu * 0.999
