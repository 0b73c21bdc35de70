"""Values of a manifest that have another type than Kubernetes has there.

A server refuses such a manifest, so what reads it need not expect them.
"""

from collections.abc import Iterator, Mapping
from typing import Any

MAPPINGS = frozenset(
    [
        *("metadata", "spec", "template", "resources", "securityContext", "affinity"),
        *("runPolicy", "schedulingPolicy", "pytorchReplicaSpecs", "mpiReplicaSpecs", "Master"),
        *("Worker", "Launcher", "elasticPolicy", "trainer", "runtimeRef", "mlPolicy"),
        *("podGroupPolicy", "torch", "mpi", "jax", "resourcesPerNode", "rayClusterSpec"),
        *("headGroupSpec", "leaderWorkerTemplate", "workerTemplate", "leaderTemplate"),
        *("emptyDir", "configMap", "secret", "hostPath", "persistentVolumeClaim", "nfs", "csi"),
        *("valueFrom", "configMapKeyRef", "secretKeyRef", "configMapRef", "secretRef"),
        *("lifecycle", "livenessProbe", "readinessProbe", "startupProbe"),
    ]
)
TEXTS_BY_NAME = frozenset(
    ("labels", "annotations", "nodeSelector", "matchLabels", "limits", "requests")
)
LISTS = frozenset(
    [
        *("containers", "initContainers", "volumes", "volumeMounts", "volumeDevices", "env"),
        *("envFrom", "tolerations", "imagePullSecrets", "replicatedJobs", "tasks"),
        *("replicaSpecs", "workerGroupSpecs", "ports", "topologySpreadConstraints", "claims"),
        *("resourceClaims",),
    ]
)
"""Of mappings."""
TEXTS = frozenset(("command", "args"))
TEXT = frozenset(
    [
        *("apiVersion", "kind", "name", "namespace", "generateName", "image", "workingDir"),
        *("mountPath", "subPath", "claimName", "path", "key", "entrypoint", "runtimeEnvYAML"),
        *("serviceAccountName", "serviceAccount", "queue", "priorityClassName", "schedulerName"),
        *("runtimeClassName", "imagePullPolicy", "medium"),
    ]
)
ONE = frozenset(
    [
        *("value", "replicas", "parallelism", "nprocPerNode", "slotsPerWorker", "numNodes"),
        *("size", "numProcPerNode", "minReplicas", "hostNetwork", "hostIPC", "sizeLimit"),
        *("readOnly",),
    ]
)
"""A text, a number or a truth value."""


def without_nulls(value: Any) -> Any:
    """`value` with texts as keys, and without keys whose value is null, which Kubernetes takes for
    absent; the names in limits and labels stay."""
    if isinstance(value, list):
        return [without_nulls(one) for one in value]
    if not isinstance(value, dict):
        return value
    texts = {str(key): one for key, one in value.items()}
    return {
        key: (
            {str(name): each for name, each in one.items()}
            if _names(key, one)
            else without_nulls(one)
        )
        for key, one in texts.items()
        if one is not None
    }


def _names(key: str, value: Any) -> bool:
    return key in TEXTS_BY_NAME and isinstance(value, dict)


def wrong_types(value: Any, place: str = "") -> Iterator[str]:
    """One text for each such value below the object or list `value`."""
    if isinstance(value, list):
        for number, one in enumerate(value):
            yield from wrong_types(one, f"{place}[{number}]")
    if not isinstance(value, Mapping):
        return
    for key, one in value.items():
        here = f"{place}.{key}" if place else key
        if must := _must(key, one):
            yield f"{here} must be {must}, not {_kind(one)}"
        elif key not in (*TEXTS_BY_NAME, "dependsOn"):  # of Volcano, with names of its own
            yield from wrong_types(one, here)


def _must(key: str, value: Any) -> str:
    """What the value of `key` must be; empty if it is that."""
    if key in MAPPINGS and not isinstance(value, dict):
        return "a mapping"
    if key in TEXTS_BY_NAME and not (isinstance(value, dict) and all(map(_is_one, value.values()))):
        return "a mapping of texts"
    if key in LISTS and not (isinstance(value, list) and all(isinstance(i, dict) for i in value)):
        return "a list of mappings"
    if key in TEXTS and not (isinstance(value, list) and all(map(_is_one, value))):
        return "a list of texts"
    if key in TEXT and not isinstance(value, str):
        return "a text"
    return "one value" if key in ONE and not _is_one(value) else ""


def _is_one(value: Any) -> bool:
    return not isinstance(value, dict | list)


def _kind(value: Any) -> str:
    if isinstance(value, dict):
        return "a mapping"
    return "such a list" if isinstance(value, list) else f"{str(value)[:40]!r}"
