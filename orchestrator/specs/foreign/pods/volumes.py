"""Volumes of another tool's pods, and the part of `pod_template` that takes what has no key."""

from collections.abc import Mapping
from typing import Any

from orchestrator.specs.foreign.carried import Carried, braced
from orchestrator.specs.foreign.pods.manifests import at

CONTAINER: Mapping[str, str] = {"pytorchjob": "pytorch", "jobset": "pytorch", "trainjob": "node"}
"""The container of ndctl's agent in the pods of each kind, as the renderer names it."""


def own_container(kubernetes: dict[str, Any]) -> dict[str, Any]:
    """The entry of ndctl's own container in `pod_template`."""
    template = kubernetes.setdefault("pod_template", {"spec": {}})["spec"]
    own = template.setdefault("containers", [{"name": CONTAINER[kubernetes["kind"]]}])
    found: dict[str, Any] = own[0]
    return found


SOURCES = (
    ("persistentVolumeClaim", "claimName", "claim"),
    ("hostPath", "path", "host_path"),
    ("secret", "secretName", "secret"),
    ("configMap", "name", "config_map"),
    ("emptyDir", "sizeLimit", "empty_dir"),
)
"""Source of a volume and its field in Kubernetes; its key in a spec."""


def set_volumes(
    carried: Carried,
    kubernetes: dict[str, Any],
    pod: Mapping[str, Any],
    container: Mapping[str, Any],
) -> None:
    """Volumes of the training, and the others of the pod as they are."""
    named = {at(one, "name"): one for one in pod.get("volumes") or []}
    found: list[dict[str, Any]] = []
    others = _mounted_elsewhere(pod, container)
    kubernetes["runs"] = {}
    for mount in container.get("volumeMounts") or []:
        name, path = at(mount, "name"), str(at(mount, "mountPath"))
        volume = named.get(name) or {}
        if path == "/dev/shm":
            size = at(volume, "emptyDir", "sizeLimit")
            kubernetes.update({"shm": braced(str(size))} if size is not None else {})
            if "emptyDir" not in volume:
                carried.leave(
                    f"the volume {name} at {path}: ndctl mounts memory there, and"
                    " cluster.kubernetes.shm is its size"
                )
            continue
        source = next(((key, value) for key, value in _source(volume)), None)
        if source is None or len(mount.keys() - {"name", "mountPath", "readOnly"}):
            own_container(kubernetes).setdefault("volumeMounts", []).append(dict(mount))
            others.append(name)
            continue
        if name in [one["name"] for one in found]:
            own_container(kubernetes).setdefault("volumeMounts", []).append(dict(mount))
            continue
        read_only = bool(mount.get("readOnly"))
        found.append(
            {"name": name, "mount_path": path, source[0]: source[1], "read_only": read_only}
        )
    if found:
        kubernetes["volumes"] = found
    taken = [one["name"] for one in found]
    if rest := [dict(named[one]) for one in named if one in others and one not in taken]:
        own_container(kubernetes)
        kubernetes["pod_template"]["spec"]["volumes"] = rest
    _runs(carried, kubernetes, found)


def _mounted_elsewhere(pod: Mapping[str, Any], container: Mapping[str, Any]) -> list[str]:
    """Volumes that the other containers of the pod mount."""
    every = [*(pod.get("initContainers") or []), *(pod.get("containers") or [])]
    return [
        str(at(mount, "name"))
        for one in every
        if one is not container and isinstance(one, dict)
        for mount in one.get("volumeMounts") or []
    ]


AS_BY_NDCTL = (
    *(("defaultMode", 420), ("optional", False), ("readOnly", False)),
    *(("type", ""), ("type", "Directory")),
)
"""Fields of a source that say what holds without them, or what ndctl sets."""


def _source(volume: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The source as a spec has it; none if a spec has no key for one of its fields."""
    return [
        (here, braced(str(volume[kind][key])))
        for kind, key, here in SOURCES
        if isinstance(volume.get(kind), dict) and volume[kind].get(key) is not None
        if all(one in AS_BY_NDCTL for one in volume[kind].items() if one[0] != key)
    ]


def _runs(carried: Carried, kubernetes: dict[str, Any], found: list[dict[str, Any]]) -> None:
    """The volume of the run directories: a shared one that the pods write anyway."""
    claims = [one["claim"] for one in found if "claim" in one and not one["read_only"]]
    if claims:
        kubernetes["runs"] = {"claim": claims[0]}
        carried.before.append(
            f"check that all pods can write to the claim {claims[0]} (ReadWriteMany); it also has"
            " the run directories now"
        )
    else:
        del kubernetes["runs"]
        carried.before.append(
            "name a volume that all pods can write: cluster.kubernetes.runs: {claim: NAME}"
        )
