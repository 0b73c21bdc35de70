"""Models and clusters for tests of the cost model."""

from functools import cache
from typing import Any

from orchestrator.contract.mesh import Mesh
from orchestrator.contract.spec.model_presets import PRESETS
from orchestrator.inventory.profile import Fabric
from orchestrator.inventory.profiles import load_profile
from orchestrator.plan.model.families import shape_of
from orchestrator.plan.setup import Setup

LLAMA_8B = shape_of(PRESETS["llama3-8b"])
LLAMA_70B = shape_of(PRESETS["llama3-70b"])
QWEN3_4B = shape_of(PRESETS["qwen3-4b"])


@cache
def fabric(profile: str = "h100-sxm-80gb", hosts: int = 1, devices: int = 8) -> Fabric:
    return Fabric(
        profile=load_profile(profile), hosts=hosts, devices_per_host=devices, hosts_per_leaf=16
    )


H100 = fabric()


def setup(**changes: Any) -> Setup:
    """Llama 3 8B on 8 ranks with one sequence of 8192 tokens each, with `changes`."""
    values: dict[str, Any] = {
        "shape": LLAMA_8B,
        "tokens": 8192,
        "mesh": Mesh(dp_shard=8),
        "micro_batch_size": 1,
        "micro_batches": 1,
    }
    return Setup(**values | changes)
