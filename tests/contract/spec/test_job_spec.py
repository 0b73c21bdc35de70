"""The parts of a job spec: checks across fields, and round trips through JSON."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.contract.codec import Invalid, Problem, decode, encode
from orchestrator.contract.files.trainer_config import TrainingConfig
from orchestrator.contract.mesh import Mesh
from orchestrator.contract.spec.data_spec import ValidationSpec
from orchestrator.contract.spec.kubernetes_spec import Toleration
from orchestrator.contract.spec.model_spec import LoraSpec
from orchestrator.contract.spec.parallel_spec import FsdpSpec, ParallelSpec, PipelineSpec
from orchestrator.contract.spec.train_spec import ProfileSpec

CONFIG: dict[str, Any] = {
    "model": {"preset": "llama-tiny"},
    "data": {"files": "*.txt", "sequence_length": 64},
    "train": {"steps": 10, "global_batch_size": 8},
    "micro_batch_size": 2,
    "out": "run",
}


def problem(kind: Any, data: Any) -> Problem:
    with pytest.raises(Invalid) as caught:
        decode(kind, data)
    (only,) = caught.value.problems
    return only


fsdp = st.builds(
    FsdpSpec,
    wrap=st.sampled_from(["auto", "LlamaDecoderLayer"]),
    reshard_after_forward=st.booleans() | st.integers(2, 64),
    forward_prefetch=st.integers(0, 4),
    backward_prefetch=st.integers(0, 4),
    cpu_offload=st.booleans(),
)
pipelines = st.builds(PipelineSpec, schedule=st.sampled_from(["gpipe", "1f1b", "zbv"]))
interleaved = st.builds(
    PipelineSpec,
    schedule=st.just("interleaved_1f1b"),
    stages_per_rank=st.just("auto") | st.integers(2, 8),
)
parallel = st.builds(
    ParallelSpec,
    pp=st.integers(1, 8),
    cp=st.integers(1, 8),
    dp_shard=st.just("auto") | st.integers(1, 8),
    fsdp=fsdp,
    context=st.sampled_from(["ring", "ulysses", "all_gather"]),
    pipeline=pipelines | interleaved,
)


@settings(deadline=None)
@given(
    parallel
    | st.builds(LoraSpec, rank=st.integers(1, 64), target_modules=st.just(("q_proj", "v_proj")))
    | st.builds(ProfileSpec, at_step=st.integers(1, 9), ranks=st.just((0, 3)))
    | st.builds(ValidationSpec, fraction=st.floats(0.01, 0.5))
)
def test_a_part_of_a_spec_survives_a_round_trip_through_json(part: Any) -> None:
    back: Any = decode(type(part), json.loads(json.dumps(encode(part))))
    assert back == part


@pytest.mark.parametrize("value", [True, False, 2, 8])
def test_a_boolean_and_a_number_keep_their_type(value: bool | int) -> None:
    back: FsdpSpec = decode(FsdpSpec, {"reshard_after_forward": value})
    assert back.reshard_after_forward is value


@pytest.mark.parametrize("value", [0, 1, -2, 2.0, "true", None])
def test_a_value_that_is_neither_boolean_nor_number_of_ranks_is_refused(value: Any) -> None:
    found = problem(ParallelSpec, {"fsdp": {"reshard_after_forward": value}})
    assert found.path == "fsdp.reshard_after_forward"
    assert found.value == value
    assert found.limit == "true or false or a whole number (at least 2) or 'auto'"
    assert found.fix


@pytest.mark.parametrize(
    ("schedule", "stages", "limit"),
    [
        ("gpipe", 2, "1 with schedule gpipe"),
        ("1f1b", 3, "1 with schedule 1f1b"),
        ("interleaved_1f1b", 1, "at least 2 with schedule interleaved_1f1b"),
        ("zbv", 1, "2 with schedule zbv"),
        ("zbv", 4, "2 with schedule zbv"),
    ],
)
def test_stages_must_suit_the_schedule(schedule: str, stages: int, limit: str) -> None:
    data = {"pipeline": {"schedule": schedule, "stages_per_rank": stages}}
    found = problem(ParallelSpec, data)
    assert (found.path, found.value) == ("pipeline.stages_per_rank", stages)
    assert found.limit == limit
    assert found.fix == "set stages_per_rank to auto"


@pytest.mark.parametrize(
    ("schedule", "stages", "each"),
    [("gpipe", "auto", 1), ("1f1b", 1, 1), ("interleaved_1f1b", "auto", 2), ("zbv", "auto", 2)],
)
def test_the_number_of_stages_follows_from_the_schedule(
    schedule: Any, stages: Any, each: int
) -> None:
    assert PipelineSpec(schedule=schedule, stages_per_rank=stages).stages == each
    assert PipelineSpec(schedule="interleaved_1f1b", stages_per_rank=5).stages == 5


def test_options_of_sharding_are_refused_with_ddp_and_zero1() -> None:
    with pytest.raises(Invalid) as caught:
        decode(
            ParallelSpec, {"data": "ddp", "dp_shard": 2, "fsdp": {"wrap": "A", "cpu_offload": 1}}
        )
    assert [one.path for one in caught.value.problems] == ["fsdp.cpu_offload"]
    with pytest.raises(Invalid) as caught:
        decode(ParallelSpec, {"data": "ddp", "dp_shard": 2, "fsdp": {"forward_prefetch": 2}})
    shards, knobs = caught.value.problems
    assert (shards.path, shards.value) == ("dp_shard", 2)
    assert (knobs.path, knobs.value) == ("fsdp", "forward_prefetch")
    assert decode(ParallelSpec, {"data": "zero1", "dp_shard": 1, "fsdp": {}}) is not None


@pytest.mark.parametrize(
    ("wish", "mesh"),
    [
        ({}, Mesh(dp_shard=8)),
        ({"pp": 2, "cp": 2}, Mesh(pp=2, dp_shard=2, cp=2)),
        ({"data": "ddp", "dp_replicate": 8}, Mesh(dp_replicate=8)),
        ({"data": "zero1", "cp": 2}, Mesh(cp=2)),
    ],
)
def test_auto_degrees_follow_from_the_number_of_ranks(wish: dict[str, Any], mesh: Mesh) -> None:
    assert ParallelSpec(**wish).filled(8).mesh == mesh


@pytest.mark.parametrize(
    ("said", "path"),
    [
        ({"key": "a", "toleration_seconds": 0}, "effect"),
        ({"key": "a", "effect": "NoSchedule", "toleration_seconds": 9}, "effect"),
        ({"operator": "Equal"}, "operator"),
        ({"key": "a", "value": "b"}, "value"),
    ],
)
def test_a_toleration_that_kubernetes_refuses_is_refused(said: dict[str, Any], path: str) -> None:
    with pytest.raises(Invalid) as raised:
        Toleration(**said)
    assert [one.path for one in raised.value.problems] == [path]


def test_a_trainers_configuration_is_checked_as_a_spec_is() -> None:
    train = CONFIG["train"] | {"eval_every": 2}
    assert problem(TrainingConfig, CONFIG | {"train": train}).path == "train.eval_every"
    parallel_ = {"dp_shard": 3, "tp": 1}
    found = problem(TrainingConfig, CONFIG | {"parallel": parallel_})
    assert found.path == "train.global_batch_size"
    assert found.limit == "a multiple of 3 data-parallel ranks x micro batch 2 = 6"
