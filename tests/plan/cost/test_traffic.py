"""Bytes that the trainer sends in a step."""

from typing import Any

import pytest

from orchestrator.contract.mesh import Mesh
from orchestrator.contract.plan import Traffic
from orchestrator.contract.spec.model_spec import LoraSpec
from orchestrator.contract.spec.parallel_spec import PipelineSpec
from orchestrator.plan.cost.collectives import ring_all_reduce_bytes
from orchestrator.plan.cost.traffic import traffic_of
from orchestrator.plan.setup import Setup
from tests.plan.cost.setups import H100, LLAMA_8B, QWEN3_4B, fabric, setup

GB = 1e9
LINEAR = 2 * LLAMA_8B.num_layers * LLAMA_8B.layer_matrices


def bytes_sent(one: Setup, axis: str, collective: str, what: str = "", hosts: int = 1) -> float:
    return sum(
        traffic.bytes_per_step
        for traffic in traffic_of(one, fabric(hosts=hosts))
        if (traffic.axis, traffic.collective) == (axis, collective) and what in traffic.what
    )


def traffic_by_collective(one: Setup, hosts: int = 1) -> dict[tuple[str, str], Traffic]:
    return {(t.axis, t.collective): t for t in traffic_of(one, fabric(hosts=hosts))}


def test_fsdp_of_4b_in_bfloat16_moves_24_gb_a_step() -> None:
    """Three times 8 GB: two gathers of weights and one reduce-scatter of gradients."""
    many = setup(shape=QWEN3_4B, tokens=2048, mesh=Mesh(dp_shard=256), reduce_dtype="bfloat16")
    total = sum(traffic.bytes_per_step for traffic in traffic_of(many, fabric(hosts=32)))
    # The tied embedding and the last layer stay gathered until the backward pass.
    assert 0.9 * 24 * GB < total < 24.2 * GB


def test_tensor_parallel_of_4b_moves_1_to_2_gb_at_ordinary_shapes() -> None:
    for tokens in (2048, 4096):
        one = setup(shape=QWEN3_4B, tokens=tokens, mesh=Mesh(tp=2))
        total = sum(traffic.bytes_per_step for traffic in traffic_of(one, H100))
        # Each layer has eight collectives of the hidden states, each of which sends half of them.
        by_hand = (8 * 36 + 4) * tokens * 2560 * 2 / 2
        assert total == pytest.approx(by_hand)
        assert GB < total < 3.1 * GB
        assert (total < 2 * GB) == (tokens == 2048)


def test_fsdp_gathers_for_every_micro_batch_and_reduces_once_a_step() -> None:
    one, four = setup(), setup(micro_batches=4)
    assert bytes_sent(four, "dp_shard", "all-gather") == 4 * bytes_sent(
        one, "dp_shard", "all-gather"
    )
    assert bytes_sent(four, "dp_shard", "reduce-scatter") == bytes_sent(
        one, "dp_shard", "reduce-scatter"
    )
    assert bytes_sent(one, "dp_shard", "reduce-scatter") == pytest.approx(
        LLAMA_8B.parameters * 4 * 7 / 8, rel=1e-6
    )


def test_gradients_reduced_with_each_micro_batch_move_as_often() -> None:
    """Replicas still average their shards once."""
    mesh = Mesh(dp_replicate=2, dp_shard=8)
    last, each = (setup(mesh=mesh, micro_batches=4, reduce=how) for how in ("last", "each"))
    sent = [bytes_sent(one, "dp_shard", "reduce-scatter", hosts=2) for one in (last, each)]
    assert sent[1] == 4 * sent[0] > 0
    averaged = [bytes_sent(one, "dp_replicate", "all-reduce", hosts=2) for one in (last, each)]
    assert averaged[1] == averaged[0] > 0


def test_weights_that_stay_gathered_are_gathered_once_a_step() -> None:
    kept = setup(reshard=False, micro_batches=4)
    assert bytes_sent(kept, "dp_shard", "all-gather") == pytest.approx(
        LLAMA_8B.parameters * 2 * 7 / 8, rel=1e-6
    )


def test_resharding_to_n_ranks_gathers_again_among_n_ranks() -> None:
    whole, half = setup(), setup(reshard=2)
    kept = setup(reshard=False)
    once = bytes_sent(kept, "dp_shard", "all-gather")
    again = bytes_sent(whole, "dp_shard", "all-gather") - once
    assert bytes_sent(half, "dp_shard", "all-gather") - once == pytest.approx(
        again * (1 / 2) / (7 / 8)
    )


def test_gathers_after_resharding_stay_among_the_fewer_ranks() -> None:
    """With 8 ranks per host: weights are gathered once over all hosts and again within the host."""
    rows = {
        row.what: row
        for row in traffic_of(setup(mesh=Mesh(dp_shard=32), reshard=8), fabric(hosts=4))
    }
    assert rows["weights"].by_level["leaf"] > 0
    assert rows["weights again"].level == "host"
    assert rows["weights again"].by_level["leaf"] == 0


def test_hsdp_sums_shards_between_replicas() -> None:
    copies = traffic_by_collective(setup(mesh=Mesh(dp_replicate=4, dp_shard=8)), hosts=4)
    summed = copies["dp_replicate", "all-reduce"]
    assert summed.bytes_per_step == pytest.approx(2 * 3 / 4 * LLAMA_8B.parameters * 4 / 8)
    assert summed.level == "leaf"
    assert copies["dp_shard", "all-gather"].level == "host"


def test_ddp_sends_all_parts_but_one_twice_and_zero1_no_more() -> None:
    copied = setup(mesh=Mesh(dp_replicate=8), data="ddp")
    zero1 = setup(mesh=Mesh(dp_replicate=8), data="zero1")
    all_reduced = bytes_sent(copied, "dp_replicate", "all-reduce")
    assert all_reduced == pytest.approx(2 * 7 / 8 * LLAMA_8B.parameters * 4)
    both = bytes_sent(zero1, "dp_replicate", "all-gather") + bytes_sent(
        zero1, "dp_replicate", "reduce-scatter"
    )
    assert both == pytest.approx(all_reduced)


def test_accumulation_adds_no_traffic_between_replicas() -> None:
    one = setup(mesh=Mesh(dp_replicate=8), data="ddp")
    four = setup(mesh=Mesh(dp_replicate=8), data="ddp", micro_batches=4)
    assert bytes_sent(one, "dp_replicate", "all-reduce") == bytes_sent(
        four, "dp_replicate", "all-reduce"
    )


def test_context_parallel_ranks_share_shards() -> None:
    one = traffic_by_collective(setup(mesh=Mesh(dp_shard=4, cp=2)))
    assert ("dp_shard x cp", "all-gather") in one
    assert ("cp", "all-gather") in traffic_by_collective(setup(mesh=Mesh(cp=8), context="ring"))


KEYS = 32 * 2 * 1024 * 8192 // 8
"""Number of keys and values in all layers for a rank's share of 8192 tokens over 8 ranks."""


@pytest.mark.parametrize(
    ("context", "expected"),
    [
        # Seven hops in the forward pass, seven in the backward pass, and eight of float32 sums.
        ("ring", 7 * KEYS * 2 * 2 + 8 * KEYS * 4),
        # The keys of seven other ranks twice, and a reduce-scatter of float32 sums.
        ("all_gather", 2 * 7 * KEYS * 2 + 7 * KEYS * 4),
        # Queries (four times as many as keys), keys, values and results, in both directions.
        ("ulysses", 2 * (KEYS + 2 * KEYS * 2) * 2 * 7 / 8),
    ],
)
def test_context_parallel_traffic_depends_on_the_method(context: Any, expected: float) -> None:
    one = setup(mesh=Mesh(cp=8), context=context)
    found = sum(
        t.bytes_per_step for t in traffic_of(one, H100) if "keys" in t.what and t.axis == "cp"
    )
    assert found == pytest.approx(expected)


def test_full_recomputation_repeats_all_traffic_but_the_last_result() -> None:
    plain, full = (setup(mesh=Mesh(tp=8), checkpointing=kind) for kind in ("none", "full"))
    ends = 2 * 8192 * 4096 * 2 * 7 / 8
    gathered = bytes_sent(plain, "tp", "all-gather") - ends
    scattered = bytes_sent(plain, "tp", "reduce-scatter") - ends
    assert bytes_sent(full, "tp", "all-gather") - ends == pytest.approx(gathered * 3 / 2)
    assert bytes_sent(full, "tp", "reduce-scatter") - ends == pytest.approx(scattered * 5 / 4)


def test_gathers_repeats_gathers_whose_inputs_weights_need() -> None:
    def gathered(lora: LoraSpec | None, kind: str) -> float:
        one = setup(mesh=Mesh(tp=8), checkpointing=kind, lora=lora)
        return bytes_sent(one, "tp", "all-gather") - 2 * 8192 * 4096 * 2 * 7 / 8

    for targets, share in ((None, 1), (("q_proj", "v_proj"), 0.5), (("o_proj",), 0)):
        lora = LoraSpec(rank=8, target_modules=targets) if targets else None
        plain = gathered(lora, "none")
        assert gathered(lora, "gathers") == pytest.approx(plain * (1 + share / 2))


@pytest.mark.parametrize("kind", ["elementwise", "selective"])
def test_recomputation_by_operation_repeats_only_gathers(kind: str) -> None:
    plain, other, full = (
        setup(mesh=Mesh(tp=8), checkpointing=each) for each in ("none", kind, "full")
    )
    scattered = [bytes_sent(one, "tp", "reduce-scatter") for one in (plain, other)]
    assert scattered[0] == scattered[1]
    assert bytes_sent(other, "tp", "all-gather") == bytes_sent(full, "tp", "all-gather")
    plain, other = (
        setup(mesh=Mesh(cp=8), context="all_gather", checkpointing=each) for each in ("none", kind)
    )
    assert bytes_sent(plain, "cp", "all-gather") == bytes_sent(other, "cp", "all-gather")


def test_stages_send_hidden_states_and_gradients() -> None:
    pipe = setup(mesh=Mesh(pp=4, dp_shard=2), micro_batches=8)
    state = 8192 * 4096 * 2
    assert bytes_sent(pipe, "pp", "send") == 8 * 2 * state
    two = PipelineSpec(schedule="interleaved_1f1b")
    assert (
        bytes_sent(setup(mesh=Mesh(pp=4, dp_shard=2), micro_batches=8, pipeline=two), "pp", "send")
        == 2 * 8 * 2 * state
    )


@pytest.mark.parametrize(
    ("schedule", "pp", "sends"),
    [
        ("1f1b", 2, 1),
        ("1f1b", 3, 2),
        ("interleaved_1f1b", 2, 3),
        ("interleaved_1f1b", 3, 4),
        ("zbv", 2, 2),
        ("zbv", 3, 4),
    ],
)
def test_the_ends_of_a_pipeline_have_one_neighbour(schedule: Any, pp: int, sends: int) -> None:
    pipe = setup(mesh=Mesh(pp=pp), micro_batches=6, pipeline=PipelineSpec(schedule=schedule))
    row = traffic_by_collective(pipe)["pp", "send"]
    assert row.messages == 6 * sends
    assert row.bytes_per_step == 6 * sends * 8192 * 4096 * 2


def test_a_pipeline_keeps_weights_that_a_backward_pass_gathered() -> None:
    """torch's schedules keep weights gathered after each backward pass except the last. So each
    forward pass except the first finds them gathered."""
    pipe = setup(mesh=Mesh(pp=4, dp_shard=2), micro_batches=8)
    once = setup(mesh=Mesh(pp=4, dp_shard=2), micro_batches=8, reshard=False)
    ratio = bytes_sent(pipe, "dp_shard", "all-gather") / bytes_sent(once, "dp_shard", "all-gather")
    assert 8 < ratio <= 9


def test_frozen_weights_are_gathered_and_have_no_gradients() -> None:
    lora = setup(lora=LoraSpec(rank=8))
    assert bytes_sent(lora, "dp_shard", "all-gather") == bytes_sent(
        setup(), "dp_shard", "all-gather"
    )
    # Two matrices of rank 8 for each of q, k, v and o.
    adapters = 32 * 8 * ((4096 + 4096) * 2 + (4096 + 1024) * 2)
    assert bytes_sent(lora, "dp_shard", "reduce-scatter") == pytest.approx(
        adapters * 4 * 7 / 8, rel=1e-6
    )


def test_float8_halves_the_bytes_gathered_for_layers() -> None:
    plain, float8 = setup(reshard=False), setup(reshard=False, float8=True)
    less = bytes_sent(plain, "dp_shard", "all-gather") - bytes_sent(
        float8, "dp_shard", "all-gather"
    )
    assert less == pytest.approx(LINEAR / 2 * 7 / 8, rel=1e-3)


def test_one_rank_sends_nothing() -> None:
    assert traffic_of(setup(mesh=Mesh()), H100) == ()


def test_levels_add_up_to_the_bytes_sent() -> None:
    wide = setup(mesh=Mesh(dp_shard=64, tp=8))
    far = fabric(hosts=64)
    for row in traffic_of(wide, far):
        assert sum(row.by_level.values()) == pytest.approx(row.bytes_per_step, rel=1e-9)
        if row.axis == "tp":
            assert row.by_level == {"host": row.bytes_per_step, "leaf": 0, "spine": 0}
        else:
            # Four leaves of 16 hosts, so each sixteenth hop between hosts is between leaves.
            assert row.by_level["host"] == 0
            assert row.by_level["spine"] == pytest.approx(row.by_level["leaf"] / 15)


def test_all_to_all_leaves_a_host_more_often_than_a_ring() -> None:
    """Each of 16 ranks on 2 hosts has 8 of 15 peers elsewhere. A ring has 2 of 16 hops between
    them."""
    far = fabric(hosts=2)
    for context, share in (("ulysses", 8 / 15), ("ring", 2 / 16)):
        rows = traffic_of(setup(mesh=Mesh(cp=16), context=context), far)
        talk = next(row for row in rows if row.axis == "cp" and "keys" in row.what)
        assert talk.by_level["leaf"] == pytest.approx(share * talk.bytes_per_step)


def test_hsdp_is_a_hierarchical_all_reduce() -> None:
    """Gradients are scattered inside a host and summed between hosts, and weights are gathered.
    That sends as much as one ring over all ranks (see `test_collectives`)."""
    rows = traffic_by_collective(setup(mesh=Mesh(dp_replicate=4, dp_shard=8)), hosts=4)
    inside = rows["dp_shard", "reduce-scatter"].by_level
    outside = rows["dp_replicate", "all-reduce"].by_level
    assert inside["leaf"] == outside["host"] == 0
    gradients = LLAMA_8B.parameters * 4
    assert 2 * inside["host"] + outside["leaf"] == pytest.approx(
        ring_all_reduce_bytes(32, gradients)
    )


def test_exposed_time_is_a_part_of_the_traffic_time() -> None:
    for one in (setup(), setup(mesh=Mesh(tp=8)), setup(mesh=Mesh(pp=2, cp=2, tp=2))):
        for traffic in traffic_of(one, H100):
            assert 0 <= traffic.exposed_seconds <= traffic.seconds * (1 + 1e-9)
            assert traffic.messages > 0
