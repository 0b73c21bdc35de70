"""The bytes that the model counts are those that the trainer hands to its collectives."""

from typing import Any

import pytest

from orchestrator.contract.codec import decode
from orchestrator.contract.mesh import AXES, Mesh
from orchestrator.contract.training import TrainingConfig
from orchestrator.plan.cost.traffic import traffic_of
from orchestrator.plan.model.families import shape_of
from orchestrator.plan.setup import Setup
from tests.plan.cost.setups import H100
from tests.plan.cost.spoken import spoken

MODEL: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
TOKENS = 128
RANKS = 4


def both(
    parallel: dict[str, Any], micro_batches: int, checkpointing: Any
) -> tuple[TrainingConfig, Setup]:
    degrees = {axis: parallel.get(axis, 1) for axis in AXES}
    mesh = Mesh(**degrees)
    config: TrainingConfig = decode(
        TrainingConfig,
        {
            "model": {"config": MODEL},
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
        shape=shape_of(MODEL),
        tokens=TOKENS,
        mesh=mesh,
        micro_batch_size=1,
        micro_batches=micro_batches,
        checkpointing=checkpointing,
        data=config.parallel.data,
        reshard=config.parallel.fsdp.reshard,
        context=config.parallel.context,
        pipeline=config.parallel.pipeline,
    )
    return config, setup


@pytest.mark.parametrize(
    "parallel",
    [
        {"dp_shard": 4},
        {"dp_shard": 4, "fsdp": {"reshard_after_forward": False}},
        {"dp_replicate": 4, "data": "ddp"},
        {"dp_replicate": 4, "data": "zero1"},
        # Ring and gathered attention are operators of their own, which hide what they say.
        {"cp": 4, "context": "ulysses"},
    ],
)
def test_with_several_micro_batches(parallel: dict[str, Any]) -> None:
    agree(parallel, micro_batches=3)


@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
def test_tensor_parallel_with_recomputation(checkpointing: str) -> None:
    agree({"tp": RANKS}, micro_batches=2, checkpointing=checkpointing)


def agree(parallel: dict[str, Any], micro_batches: int, checkpointing: str = "none") -> None:
    config, setup = both(parallel, micro_batches, checkpointing)
    heard = spoken(config)
    counted: dict[str, float] = {}
    for traffic in traffic_of(setup, H100):
        whole = traffic.bytes_per_step * RANKS / (RANKS - 1)
        whole /= 2 if traffic.collective == "all-reduce" else 1
        counted[traffic.collective] = counted.get(traffic.collective, 0) + whole
    assert heard.keys() == counted.keys()
    for collective, size in counted.items():
        assert heard[collective] == pytest.approx(size, rel=1e-6), collective
