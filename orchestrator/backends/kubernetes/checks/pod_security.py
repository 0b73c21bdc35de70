"""Which Pod Security Standard a job's pods need, and what a namespace insists on. Pure.

The API server refuses pods, not the job that makes them: nobody else says so at submission."""

from collections.abc import Iterator, Sequence
from typing import Literal

from orchestrator.backends.kubernetes.resources import Object, lookup
from orchestrator.contract.spec.kubernetes_spec import KubernetesSpec

Level = Literal["privileged", "baseline", "restricted"]
ENFORCE = "pod-security.kubernetes.io/enforce"
BURSTABLE = (
    "the training operator's own init container of workers asks for less than its limits, so that"
    " workers are Burstable, unless its --pytorch-init-container-template-file gives it equal ones"
)
INIT_CONTAINER = (
    "the training operator's own init container of workers has no security context"
    " unless its --pytorch-init-container-template-file gives it one"
)


def level_of(namespace: Object) -> Level:
    """What it insists on; without a label it is the cluster's own choice, which nobody may read."""
    found: Level = lookup(namespace, ("metadata", "labels", ENFORCE), "privileged")
    return found


def privileges(spec: KubernetesSpec) -> Sequence[str]:
    """Keys of `cluster.kubernetes` that no standard but `privileged` allows."""
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
