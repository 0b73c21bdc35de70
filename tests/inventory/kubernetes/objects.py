"""Nodes and pods in the format of the API, from `tests/captured/kubernetes` and generated."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

CAPTURED = Path(__file__).parents[2] / "captured" / "kubernetes"
GPU = "nvidia.com/gpu"


def captured(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((CAPTURED / f"{name}.json").read_text())["items"]
    return found


def node(
    name: str,
    labels: Mapping[str, str] | None = None,
    allocatable: Mapping[str, str] | None = None,
    **spec: Any,
) -> dict[str, Any]:
    """An H100 node that is Ready, with 8 GPUs."""
    product = {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}
    amounts = {GPU: "8", "cpu": "64", "memory": "512Gi", **(allocatable or {})}
    return {
        "metadata": {"name": name, "labels": {**product, **(labels or {})}},
        "spec": spec,
        "status": {
            "allocatable": amounts,
            "capacity": amounts,
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    }


def container(**requests: str) -> dict[str, Any]:
    """`gpu`, `cpu`, … as its requests."""
    names = {"gpu": GPU}
    return {"resources": {"requests": {names.get(key, key): one for key, one in requests.items()}}}


def pod(
    at: str | None,
    *containers: Mapping[str, Any],
    name: str = "p",
    phase: str = "Running",
    init: Sequence[Mapping[str, Any]] = (),
    **spec: Any,
) -> dict[str, Any]:
    bound = {} if at is None else {"nodeName": at}
    return {
        "metadata": {"name": name, "namespace": "team-a"},
        "spec": {**bound, "containers": list(containers), "initContainers": list(init), **spec},
        "status": {"phase": phase},
    }
