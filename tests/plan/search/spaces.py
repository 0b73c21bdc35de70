"""Strategies of hypothesis for small jobs on small worlds."""

from typing import Any

from hypothesis import strategies as st
from msgspec.structs import replace

from orchestrator.contract.codec import decode
from orchestrator.contract.spec.job_spec import JobSpec
from orchestrator.contract.spec.model_presets import PRESETS
from orchestrator.inventory.generate import regular
from orchestrator.inventory.hosts import Inventory
from orchestrator.inventory.profile import Fabric
from orchestrator.inventory.profiles import load_profile
from orchestrator.plan.model.families import shape_of
from orchestrator.plan.search.search_space import Space

TINY = PRESETS["llama-tiny"]
DEEP = {**TINY, "num_hidden_layers": 12, "num_key_value_heads": 8, "hidden_size": 512}
GPT2 = {"model_type": "gpt2", "vocab_size": 256, "n_embd": 64, "n_layer": 4, "n_head": 4}
H100 = load_profile("h100-sxm-80gb")
MIB = 1 << 20


def space_of(
    model: Any,
    parallel: Any,
    train: Any,
    cluster: Any,
    memory: int,
    hosts_per_block: int | None = None,
    **more: Any,
) -> Space:
    """A job on devices with `memory` bytes."""
    spec: JobSpec = decode(
        JobSpec,
        {
            "name": "a",
            "model": {"config": model},
            "data": {"files": "x", "sequence_length": 256},
            "train": {"steps": 1, "dtype": "bfloat16", **train},
            "parallel": parallel,
            "cluster": cluster,
            **more,
        },
    )
    fabric = Fabric(
        profile=replace(H100, memory_bytes=memory),
        hosts=spec.cluster.hosts,
        devices_per_host=spec.cluster.gpus_per_host,
        hosts_per_leaf=2,
        blocks=inventory_of(spec, hosts_per_block).blocks(spec.cluster.gpus_per_host),
    )
    return Space(spec, shape_of(model), fabric)


def inventory_of(spec: JobSpec, hosts_per_block: int | None) -> Inventory:
    """The hosts that `spec` asks for."""
    cluster = spec.cluster
    return regular(H100, cluster.hosts, cluster.gpus_per_host, (), hosts_per_block)


def hosts_of(space: Space) -> Inventory:
    """The hosts of `space`."""
    blocks = space.fabric.blocks
    return inventory_of(space.spec, blocks[0] if blocks else None)


degrees = st.sampled_from(["auto", "auto", "auto", 1, 2])
spaces = st.builds(
    space_of,
    model=st.sampled_from([TINY, DEEP, GPT2]),
    parallel=st.fixed_dictionaries(
        {
            "pp": degrees,
            "dp_replicate": degrees,
            "cp": degrees,
            "tp": degrees,
            "context": st.sampled_from(["ring", "ulysses", "all_gather"]),
            "fsdp": st.sampled_from(
                [
                    {},
                    {},
                    {"reshard_after_forward": True},
                    {"reshard_after_forward": 2},
                    {"reduce_gradients": "last"},
                ]
            ),
            "pipeline": st.sampled_from(
                [{}, {}, {"schedule": "1f1b"}, {"schedule": "zbv"}, {"stages_per_rank": 3}]
            ),
        }
    ),
    train=st.fixed_dictionaries(
        {
            "global_batch_size": st.sampled_from([4, 8, 12, 16]),
            "activation_checkpointing": st.sampled_from(
                ["auto", "auto", "elementwise", "selective", "full"]
            ),
            "checkpoint_every": st.sampled_from([None, None, 2]),
            "compile": st.sampled_from([False, False, "auto", True]),
            "float8": st.sampled_from([False, False, "auto"]),
            "loss_chunks": st.sampled_from(["auto", "auto", 4]),
        }
    ),
    cluster=st.sampled_from(
        [
            {"hosts": hosts, "gpus_per_host": devices}
            for hosts, devices in ((1, 1), (1, 4), (2, 2), (2, 4), (4, 2), (3, 2))
        ]
    ),
    # From a size that fits no plan to a size that fits every plan.
    hosts_per_block=st.sampled_from([None, None, 2, 3, 4]),
    memory=st.sampled_from([1, 20, 60, 150, 400, 1200, 80_000]).map(lambda size: size * MIB),
)
