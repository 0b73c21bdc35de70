"""The Pod Security Standard that a job's pods need, and that a namespace enforces. Pure.

The API server refuses the pods, but not the job object that creates them. Without this check, a
submission would succeed and its pods would never exist."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

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
OF_HOST = ("hostNetwork", "hostPID", "hostIPC")
BASELINE_CAPABILITIES = frozenset(
    {
        *("AUDIT_WRITE", "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "MKNOD"),
        *("NET_BIND_SERVICE", "SETFCAP", "SETGID", "SETPCAP", "SETUID", "SYS_CHROOT"),
    }
)
"""Those that the standard `baseline` allows to add."""


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
    yield from (f"pod_template.spec.{path}" for path in _of_pods(spec.pod_template.get("spec")))


def _of_pods(pod: Any) -> Iterator[str]:
    """Paths in the part of `pod_template` for the pods."""
    if not isinstance(pod, Mapping):
        return
    yield from (key for key in OF_HOST if pod.get(key) is True)
    for at, volume in _mappings(pod, "volumes"):
        if volume.get("hostPath") is not None:
            yield f"volumes[{at}].hostPath"
    for kind in ("initContainers", "containers"):
        for at, container in _mappings(pod, kind):
            yield from (f"{kind}[{at}].{path}" for path in _of_container(container))


def _of_container(container: Mapping[str, Any]) -> Iterator[str]:
    if lookup(container, ("securityContext", "privileged"), None) is True:
        yield "securityContext.privileged"
    added = lookup(container, ("securityContext", "capabilities", "add"), None)
    if isinstance(added, list) and not BASELINE_CAPABILITIES.issuperset(map(str, added)):
        yield "securityContext.capabilities.add"
    for at, port in _mappings(container, "ports"):
        if port.get("hostPort"):
            yield f"ports[{at}].hostPort"


def _mappings(around: Mapping[str, Any], key: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    found = around.get(key)
    for at, one in enumerate(found if isinstance(found, list) else []):
        if isinstance(one, Mapping):
            yield at, one


def to_allow(level: Level, namespace: str) -> str:
    return f"kubectl label namespace {namespace} --overwrite {ENFORCE}={level}"
