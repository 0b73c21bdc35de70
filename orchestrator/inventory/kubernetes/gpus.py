"""Finds the GPUs of a node from its labels."""

from collections.abc import Mapping
from pathlib import Path

from orchestrator.contract.files.env import KUBERNETES_GPUS
from orchestrator.inventory.gpus import GpuTable, tables
from orchestrator.inventory.kubernetes.nodes import Node
from orchestrator.inventory.profile import Profile

TABLE = Path(__file__).with_name("gpus.yaml")
PRODUCT = "nvidia.com/gpu.product"
MEMORY = "nvidia.com/gpu.memory"
"""Label with the memory of one GPU in MiB, as its driver reports it."""
KINDS = (PRODUCT, "cloud.google.com/gke-accelerator", "node.kubernetes.io/instance-type")
"""Labels that distinguish nodes with other devices, the most specific first."""


def gpu_table(environ: Mapping[str, str]) -> GpuTable:
    """ndctl's table below the one in the file NDCTL_KUBERNETES_GPUS. Raises SpecError."""
    own = [Path(environ[KUBERNETES_GPUS])] if environ.get(KUBERNETES_GPUS) else []
    return tables((*own, TABLE))


def profile_of(node: Node, table: GpuTable) -> Profile | None:
    return table.profile_of(node.labels.get(PRODUCT), features(node))


def features(node: Node) -> tuple[str, ...]:
    """Texts in which the `feature` of an entry is searched: the accelerator label of GKE, the
    machine type, and the memory of a GPU in whole GB, such as `80gb`."""
    words = [node.labels[label] for label in KINDS[1:] if label in node.labels]
    if (memory := memory_bytes(node)) is not None:
        words.append(f"{round(memory / 2**30)}gb")
    return tuple(words)


def memory_bytes(node: Node) -> int | None:
    """Memory of one GPU; None if no label has it."""
    said = node.labels.get(MEMORY, "")
    return int(said) * 2**20 if said.isdecimal() and int(said) else None
