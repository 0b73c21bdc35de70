"""The table of what a node's labels say of its GPUs."""

from collections.abc import Mapping
from pathlib import Path

from orchestrator.contract.files.env import KUBERNETES_GPUS
from orchestrator.inventory.gpus import GpuTable, tables
from orchestrator.inventory.kubernetes.nodes import Node
from orchestrator.inventory.profile import Profile

TABLE = Path(__file__).with_name("gpus.yaml")
PRODUCT = "nvidia.com/gpu.product"
MEMORY = "nvidia.com/gpu.memory"
"""MiB of one GPU, as its driver counts them."""
KINDS = (PRODUCT, "cloud.google.com/gke-accelerator", "node.kubernetes.io/instance-type")
"""Labels that tell nodes with other devices apart, the most telling first."""


def gpu_table(environ: Mapping[str, str]) -> GpuTable:
    """Ours, below that of the file which NDCTL_KUBERNETES_GPUS names. Raises SpecError."""
    own = [Path(environ[KUBERNETES_GPUS])] if environ.get(KUBERNETES_GPUS) else []
    return tables((*own, TABLE))


def profile_of(node: Node, table: GpuTable) -> Profile | None:
    return table.profile_of(node.labels.get(PRODUCT), features(node))


def features(node: Node) -> tuple[str, ...]:
    """What an entry's `feature` is looked for among: the accelerator that GKE says, the type of
    the machine, and the memory of a GPU in whole GB, as in `80gb`."""
    words = [node.labels[label] for label in KINDS[1:] if label in node.labels]
    if (memory := memory_bytes(node)) is not None:
        words.append(f"{round(memory / 2**30)}gb")
    return tuple(words)


def memory_bytes(node: Node) -> int | None:
    """Of one GPU; None where no label says it."""
    said = node.labels.get(MEMORY, "")
    return int(said) * 2**20 if said.isdecimal() and int(said) else None
