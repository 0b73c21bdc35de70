"""Content of a pod's volumes and environment, read from the API's objects."""

import base64
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.kubernetes.standins.api import Api, ApiError, Object, path
from tests.kubernetes.standins.containers import Mount, expand_variables


class MissingObject(Exception):
    """An object that the pod needs does not exist yet; the kubelet retries."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


async def mounts(api: Api, pod: Object, container: Object, folder: Path) -> list[Mount]:
    """Raises MissingObject for a missing ConfigMap, Secret or claim."""
    volumes = {volume["name"]: volume for volume in pod["spec"].get("volumes", ())}
    found = []
    for mount in container.get("volumeMounts", ()):
        volume = volumes[mount["name"]]
        source = await _source(api, pod, volume, folder / mount["name"])
        if sub := mount.get("subPath"):
            source = source / sub
        found.append(Mount(source, mount["mountPath"], bool(mount.get("readOnly"))))
    return found


async def _source(api: Api, pod: Object, volume: Object, folder: Path) -> Path:
    namespace = pod["metadata"]["namespace"]
    match volume:
        case {"hostPath": {"path": place, **more}}:
            return _host_path(Path(place), str(more.get("type", "")))
        case {"persistentVolumeClaim": {"claimName": name}}:
            claim = await _get_required(api, "persistentvolumeclaims", namespace, name)
            if claim.get("status", {}).get("phase") != "Bound":
                raise MissingObject("FailedMount", f'claim "{name}" is not bound')
            volume = await api.get(path("persistentvolumes", "", claim["spec"]["volumeName"]))
            return Path(volume["spec"]["hostPath"]["path"])
        case {"emptyDir": _}:
            folder.mkdir(parents=True, exist_ok=True)
            return folder
    fresh = folder.with_name(f"{folder.name}.new")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    sources = volume["projected"]["sources"] if "projected" in volume else [volume]
    for source in sources:
        for name, content in (await _files(api, pod, source)).items():
            place = fresh / name
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(content)
    shutil.rmtree(folder, ignore_errors=True)
    return fresh.rename(folder)


def _host_path(place: Path, kind: str) -> Path:
    if kind in ("DirectoryOrCreate", "") and not place.exists():
        place.mkdir(parents=True)
    if not place.exists():
        raise MissingObject(
            "FailedMount", f"hostPath type check failed: {place} is not a directory"
        )
    return place


async def _files(api: Api, pod: Object, source: Object) -> dict[str, bytes]:
    namespace = pod["metadata"]["namespace"]
    match source:
        case {"configMap": spec} | {"secret": spec}:
            resource = "configmaps" if "configMap" in source else "secrets"
            name = spec.get("name") or spec["secretName"]
            try:
                content = content_of(await _get_required(api, resource, namespace, name))
            except MissingObject:
                if spec.get("optional"):
                    return {}
                raise
            if items := spec.get("items"):
                return {item["path"]: content[item["key"]] for item in items}
            return content
        case {"downwardAPI": {"items": items}}:
            return {it["path"]: field_of(pod, it["fieldRef"]).encode() for it in items}
        case {"serviceAccountToken": spec}:
            account = pod["spec"].get("serviceAccountName", "default")
            where = path("serviceaccounts", namespace, account, "token")
            seconds = {"expirationSeconds": spec.get("expirationSeconds", 3600)}
            made = await api.call("POST", where, {"spec": seconds})
            return {spec["path"]: made["status"]["token"].encode()}
    raise MissingObject("FailedMount", f"the testbed has no volumes such as {source}")


async def _get_required(api: Api, resource: str, namespace: str, name: str) -> Object:
    try:
        return await api.get(path(resource, namespace, name))
    except ApiError as exc:
        what = resource.removesuffix("s")
        raise MissingObject("FailedMount", f'{what} "{name}" not found') from exc


def content_of(thing: Object) -> dict[str, bytes]:
    """Content of a ConfigMap or a Secret."""
    encoded = thing.get("binaryData" if thing.get("kind") == "ConfigMap" else "data") or {}
    plain = thing.get("data" if thing.get("kind") == "ConfigMap" else "stringData") or {}
    content = {name: base64.b64decode(value) for name, value in encoded.items()}
    return {**content, **{name: value.encode() for name, value in plain.items()}}


async def environ(
    api: Api, pod: Object, container: Object, image: Mapping[str, str]
) -> dict[str, str]:
    """Raises MissingObject for a missing key that is not optional."""
    values = dict(image)
    for source in container.get("envFrom", ()):
        ref = source.get("configMapRef") or source["secretRef"]
        resource = "configmaps" if "configMapRef" in source else "secrets"
        content = await _content(api, pod, resource, ref)
        prefix = source.get("prefix", "")
        values |= {prefix + name: value.decode() for name, value in content.items()}
    for entry in container.get("env", ()):
        if (value := await _value(api, pod, entry, values)) is not None:
            values[entry["name"]] = value
    return values


async def _value(api: Api, pod: Object, entry: Object, values: Mapping[str, str]) -> str | None:
    match entry.get("valueFrom"):
        case None:
            return expand_variables(entry.get("value", ""), values)
        case {"fieldRef": ref}:
            return field_of(pod, {"fieldPath": ref["fieldPath"]})
        case {"configMapKeyRef": ref} | {"secretKeyRef": ref}:
            resource = "configmaps" if "configMapKeyRef" in entry["valueFrom"] else "secrets"
            content = await _content(api, pod, resource, ref)
            if ref["key"] in content:
                return content[ref["key"]].decode()
            if ref.get("optional"):
                return None
            message = f"couldn't find key {ref['key']} in {resource} {ref['name']}"
            raise MissingObject("CreateContainerConfigError", message)
        case {"resourceFieldRef": ref}:
            limits = pod["spec"]["containers"][0].get("resources", {}).get("limits", {})
            return str(limits.get(ref["resource"].removeprefix("limits."), "0"))
        case other:
            raise MissingObject(
                "CreateContainerConfigError", f"no values from {other} in the testbed"
            )


async def _content(api: Api, pod: Object, resource: str, ref: Object) -> dict[str, bytes]:
    namespace = pod["metadata"]["namespace"]
    try:
        return content_of(await _get_required(api, resource, namespace, ref["name"]))
    except MissingObject as exc:
        if ref.get("optional"):
            return {}
        raise MissingObject("CreateContainerConfigError", str(exc)) from exc


def field_of(pod: Object, ref: Object) -> str:
    """A field for the downward API, such as `status.podIP` or `metadata.labels['x']`."""
    where = ref["fieldPath"]
    if "['" in where:
        field, _, key = where.removesuffix("']").partition("['")
        return str(pod["metadata"].get(field.partition(".")[2], {}).get(key, ""))
    value: Any = pod
    for part in where.split("."):
        value = value.get(part, "") if isinstance(value, dict) else ""
    if isinstance(value, dict):
        return "\n".join(f'{key}="{text}"' for key, text in value.items())
    return str(value)
