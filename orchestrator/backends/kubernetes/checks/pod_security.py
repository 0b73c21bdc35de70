"""The Pod Security Standard that a job's pods need, and that a namespace enforces. Pure.

The API server refuses the pods, but not the job object that creates them. Without this check, a
submission would succeed and its pods would never exist."""

from collections.abc import Iterator, Sequence
from typing import Literal

from orchestrator.backends.kubernetes.resources import Object, lookup
from orchestrator.contract.spec.kubernetes_spec import KubernetesSpec

Level = Literal["privileged", "baseline", "restricted"]
ENFORCE = "pod-security.kubernetes.io/enforce"
BURSTABLE = (
    "the training operator's own init container of workers requests less than its limits, so"
    " workers are Burstable, unless its --pytorch-init-container-template-file sets equal values"
)
INIT_CONTAINER = (
    "the training operator's own init container of workers has no security context"
    " unless its --pytorch-init-container-template-file sets one"
)


def level_of(namespace: Object) -> Level:
    """The level that a namespace enforces. Without a label it is the cluster's default, which
    cannot be read."""
    found: Level = lookup(namespace, ("metadata", "labels", ENFORCE), "privileged")
    return found


def privileges(spec: KubernetesSpec) -> Sequence[str]:
    """Keys of `cluster.kubernetes` that only the standard `privileged` allows."""
    return tuple(_privileges(spec))


def _privileges(spec: KubernetesSpec) -> Iterator[str]:
    if spec.runs.host_path is not None:
        yield "runs.host_path"
    for at, volume in enumerate(spec.volumes):
        if volume.host_path is not None:
            yield f"volumes[{at}].host_path"
    if spec.host_network:
        yield "host_network"
    if spec.rdma_resource is not None:
        yield "rdma_resource"


def to_allow(level: Level, namespace: str) -> str:
    return f"kubectl label namespace {namespace} --overwrite {ENFORCE}={level}"
