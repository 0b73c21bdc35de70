"""Fake nodes as a kubelet would register them: resources, labels and topology."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime

from tests.kubernetes.standins.api import Object


@dataclass(frozen=True)
class Shape:
    """Number and properties of a testbed's nodes `node1`, `node2`, …

    A rack has `leaf` nodes, a block has two racks.
    """

    nodes: int = 4
    gpus: int = 2
    leaf: int = 2
    cpu: str = "16"
    memory: str = "64Gi"
    product: str = "NVIDIA-H100-80GB-HBM3"
    net: int = 77
    """Second byte of the addresses of nodes and pods, 127.net.x.y."""
    labels: Mapping[str, str] = field(default_factory=dict)


def names(shape: Shape) -> tuple[str, ...]:
    return tuple(f"node{number}" for number in range(1, shape.nodes + 1))


def address(shape: Shape, number: int) -> str:
    return f"127.{shape.net}.{number // 250}.{number % 250 + 1}"


def node(shape: Shape, number: int, port: int, version: str) -> Object:
    """The Node object. Its status has to be written by a separate request.

    `version` is the API server's version.
    """
    name, rack = f"node{number}", (number - 1) // shape.leaf
    topology = {"zone": "zone1", "block": f"block{rack // 2 + 1}", "rack": f"rack{rack + 1}"}
    labels = {
        "kubernetes.io/hostname": name,
        "kubernetes.io/os": "linux",
        "kubernetes.io/arch": "amd64",
        **{f"topology.kubernetes.io/{level}": value for level, value in topology.items()},
        **({"nvidia.com/gpu.product": shape.product} if shape.gpus else {}),
        **shape.labels,
    }
    sizes = {"cpu": shape.cpu, "memory": shape.memory, "pods": "110", "ephemeral-storage": "100Gi"}
    sizes |= {"nvidia.com/gpu": str(shape.gpus)} if shape.gpus else {}
    status = {
        "capacity": sizes,
        "allocatable": sizes,
        "addresses": [
            {"type": "InternalIP", "address": address(shape, number)},
            {"type": "Hostname", "address": name},
        ],
        "declaredFeatures": ["ExtendWebSocketsToKubelet"],  # API servers know it from 1.35 on.
        "daemonEndpoints": {"kubeletEndpoint": {"Port": port}},
        "nodeInfo": {
            **dict.fromkeys(("machineID", "systemUUID", "bootID", "kernelVersion"), ""),
            "osImage": "testbed",
            "containerRuntimeVersion": "process://1",
            "kubeletVersion": version,
            "kubeProxyVersion": version,
            "operatingSystem": "linux",
            "architecture": "amd64",
        },
        "conditions": conditions(ready=True),
    }
    metadata = {"name": name, "labels": labels}
    return {"apiVersion": "v1", "kind": "Node", "metadata": metadata, "status": status}


def conditions(*, ready: bool) -> list[Object]:
    """If not ready, the condition that the node controller sets when a kubelet stops reporting."""
    fields = (
        {"status": "True", "reason": "KubeletReady", "message": "kubelet is posting ready status"}
        if ready
        else {
            "status": "Unknown",
            "reason": "NodeStatusUnknown",
            "message": "Kubelet stopped posting node status.",
        }
    )
    return [{"type": "Ready", "lastTransitionTime": now(), "lastHeartbeatTime": now(), **fields}]


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
