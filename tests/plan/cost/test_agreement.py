"""The cost model counts as many bytes as the trainer gives to its collectives."""

from collections import Counter
from typing import Any

import pytest

from orchestrator.contract.codec import decode
from orchestrator.contract.files.trainer_config import TrainingConfig
from orchestrator.contract.mesh import AXES, Mesh
from orchestrator.plan.cost.traffic import traffic_of
from orchestrator.plan.model.families import shape_of
from orchestrator.plan.setup import Setup
from tests.plan.cost.setups import H100
from tests.plan.cost.trainer_traffic import TrafficByAxis, traffic_of_rank

MODEL: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
}
TOKENS = 128


def both(
    parallel: dict[str, Any],
    micro_batches: int,
    checkpointing: Any = "none",
    layers: int = 4,
    tied: bool = False,
) -> tuple[TrainingConfig, Setup]:
    degrees = {axis: parallel.get(axis, 1) for axis in AXES}
    mesh = Mesh(**degrees)
    model = MODEL | {"num_hidden_layers": layers, "tie_word_embeddings": tied}
    config: TrainingConfig = decode(
        TrainingConfig,
        {
            "model": {"config": model},
            "data": {"files": "nothing", "sequence_length": TOKENS},
            "train": {
                "steps": 1,
                "global_batch_size": mesh.data_parallel * micro_batches,
                "dtype": "bfloat16",
                "activation_checkpointing": checkpointing,
            },
            "parallel": parallel | degrees,
            "micro_batch_size": 1,
            "out": "nowhere",
        },
    )
    setup = Setup(
        shape=shape_of(model),
        tokens=TOKENS,
        mesh=mesh,
        micro_batch_size=1,
        micro_batches=micro_batches,
        checkpointing=checkpointing,
        data=config.parallel.data,
        reshard=config.parallel.fsdp.reshard,
        reduce=config.parallel.fsdp.reduce,
        context=config.parallel.context,
        pipeline=config.parallel.pipeline,
    )
    return config, setup


@pytest.mark.parametrize(
    "parallel",
    [
        {"dp_shard": 4},
        {"dp_shard": 4, "fsdp": {"reshard_after_forward": False}},
        {"dp_shard": 4, "fsdp": {"reduce_gradients": "last"}},
        {"dp_replicate": 2, "dp_shard": 4},
        {"dp_replicate": 2, "dp_shard": 4, "fsdp": {"reduce_gradients": "last"}},
        {"dp_replicate": 2, "dp_shard": 4, "fsdp": {"reshard_after_forward": 2}},
        {"dp_replicate": 4, "data": "ddp"},
        {"dp_replicate": 4, "data": "zero1"},
        {"cp": 4, "context": "ring"},
        {"cp": 4, "context": "all_gather"},
        {"cp": 4, "context": "ulysses"},
    ],
)
def test_planner_and_trainer_agree_with_several_micro_batches(parallel: dict[str, Any]) -> None:
    agree(parallel, micro_batches=3)


@pytest.mark.parametrize("checkpointing", ["none", "elementwise", "selective", "full"])
def test_planner_and_trainer_agree_on_tensor_parallel_with_recomputation(
    checkpointing: str,
) -> None:
    agree({"tp": 4}, micro_batches=2, checkpointing=checkpointing)


@pytest.mark.slow
@pytest.mark.parametrize("context", ["ring", "all_gather", "ulysses"])
def test_planner_and_trainer_agree_on_several_axes_with_recomputation(context: str) -> None:
    parallel = {"dp_replicate": 2, "dp_shard": 2, "cp": 2, "tp": 2, "context": context}
    agree(parallel, micro_batches=2, checkpointing="full")


def test_planner_and_trainer_agree_on_the_last_of_two_stages() -> None:
    agree({"pp": 2, "dp_shard": 2, "pipeline": {"schedule": "1f1b"}}, micro_batches=4, rank=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "pp", "stages", "reshard"),
    [
        ("1f1b", 4, 1, True),
        ("1f1b", 4, 1, 2),
        ("gpipe", 4, 1, False),
        ("interleaved_1f1b", 2, 2, True),
        ("interleaved_1f1b", 3, 3, True),
        ("interleaved_1f1b", 2, 4, True),
        ("zbv", 2, 2, True),
        ("zbv", 3, 2, False),
    ],
)
def test_planner_and_trainer_agree_on_pipelines(
    schedule: str, pp: int, stages: int, reshard: bool | int
) -> None:
    """The planner reports the weight traffic of the slowest rank, and the sends of the rank with
    the most sends."""
    parallel = {
        "pp": pp,
        "dp_shard": 4,
        "fsdp": {"reshard_after_forward": reshard},
        "pipeline": {"schedule": schedule, "stages_per_rank": stages},
    }
    config, setup = both(parallel, 6, layers=9)
    counters = [traffic_of_rank(config, rank) for rank in range(0, config.mesh.world_size, 4)]
    counted = bytes_of(setup)
    assert counted.pop(("pp", "send")) == max(
        counter.bytes.pop(("pp", "send")) for counter in counters
    )
    assert any(counter.bytes == pytest.approx(counted, rel=1e-6) for counter in counters)


@pytest.mark.parametrize(
    "pipeline",
    [
        {"pp": 2, "dp_shard": 2, "pipeline": {"schedule": "1f1b"}},
        pytest.param({"pp": 2, "tp": 2, "pipeline": {"schedule": "1f1b"}}, marks=pytest.mark.slow),
        pytest.param(
            {"pp": 2, "dp_replicate": 2, "data": "ddp", "pipeline": {"schedule": "1f1b"}},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"pp": 2, "dp_replicate": 2, "data": "zero1", "pipeline": {"schedule": "1f1b"}},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"pp": 2, "dp_shard": 2, "pipeline": {"schedule": "zbv", "stages_per_rank": 2}},
            marks=pytest.mark.slow,
        ),
    ],
    ids=str,
)
def test_planner_and_trainer_agree_on_a_tied_matrix_on_two_stages(pipeline: dict[str, Any]) -> None:
    config, setup = both(pipeline, 4, tied=True)
    counted = bytes_of(setup)
    counted["pp", "send"] += counted.pop(("pp", "exchange"), 0)
    assert traffic_of_rank(config).bytes["pp", "send"] == counted["pp", "send"]


def agree(
    parallel: dict[str, Any], micro_batches: int, checkpointing: str = "none", rank: int = 0
) -> None:
    config, setup = both(parallel, micro_batches, checkpointing)
    counter = traffic_of_rank(config, rank)
    assert counter.bytes == pytest.approx(bytes_of(setup), rel=1e-6)
    messages: TrafficByAxis = Counter()
    for row in traffic_of(setup, H100):
        messages[row.axis, row.collective] += row.messages
    assert counter.calls == messages


def bytes_of(setup: Setup) -> TrafficByAxis:
    sent: TrafficByAxis = Counter()
    for row in traffic_of(setup, H100):
        sent[row.axis, row.collective] += row.bytes_per_step
    return sent
