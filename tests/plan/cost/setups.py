"""Models and clusters that the tests of cost share."""

from functools import cache
from typing import Any

from orchestrator.cluster.profile import Fabric
from orchestrator.cluster.profiles import load_profile
from orchestrator.contract.mesh import Mesh
from orchestrator.plan.model.families import shape_of
from orchestrator.plan.setup import Setup

LLAMA_8B = shape_of(
    {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
    }
)
LLAMA_70B = shape_of(
    {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
    }
)
QWEN3_4B = shape_of(
    {
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": True,
    }
)


@cache
def fabric(profile: str = "h100-sxm-80gb", hosts: int = 1, devices: int = 8) -> Fabric:
    return Fabric(
        profile=load_profile(profile), hosts=hosts, devices_per_host=devices, hosts_per_leaf=16
    )


H100 = fabric()


def setup(**changes: Any) -> Setup:
    """8B on 8 ranks, one sequence of 8192 tokens each, unless `changes` says otherwise."""
    values: dict[str, Any] = {
        "shape": LLAMA_8B,
        "tokens": 8192,
        "mesh": Mesh(dp_shard=8),
        "micro_batch_size": 1,
        "micro_batches": 1,
    }
    return Setup(**values | changes)
