"""Settings that Kubernetes or its operator would reject or silently drop. Pure."""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec

from orchestrator.backends.kubernetes.render import names
from orchestrator.backends.kubernetes.render.pod_schema import strangers
from orchestrator.backends.kubernetes.render.pods import CONTAINER_LISTS, HANDOVER_DIR
from orchestrator.backends.kubernetes.resources import ETCD_BYTES, TO_SHORTEN, Object
from orchestrator.contract.codec import Problem, fields_of
from orchestrator.contract.launch import LaunchPlan
from orchestrator.contract.spec.kubernetes_spec import (
    IMAGE,
    LABEL_LIMIT,
    Kind,
    KubernetesSpec,
    too_long_name,
)
from orchestrator.inventory.kubernetes.quantities import quantity

PLACE = "cluster.kubernetes"
OPERATORS = re.compile(
    r"PET_.*|NDCTL_.*|RANK|LOCAL_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|MASTER_ADDR|MASTER_PORT"
    r"|JOB_COMPLETION_INDEX|TORCHELASTIC_.*"
)
ENV_NAME = re.compile(r"[-._a-zA-Z][-._a-zA-Z0-9]*")
LONGEST_VARIABLE = (128 << 10) - 1
"""MAX_ARG_STRLEN of Linux, without the NUL at the end. The kernel starts no program with more."""
GANG_SCHEDULERS: Mapping[Kind, tuple[Literal["volcano", "coscheduling"], ...]] = {
    "pytorchjob": ("volcano", "coscheduling"),
    "trainjob": ("coscheduling",),
    "jobset": (),
}
OWN_VOLUMES = ("submission", "runs", "shm")


def problems(launch: LaunchPlan) -> Iterator[Problem]:
    spec = launch.kubernetes_spec
    yield from missing(spec)
    yield from _names(launch, spec)
    yield from _environment(spec)
    yield from _volumes(spec)
    yield from _labels(spec)
    yield from _scheduling(spec)
    yield from _template(spec)
    yield from _guaranteed(spec)
    if spec.ttl_after_finished is not None and spec.kind == "trainjob":
        yield Problem(
            path=f"{PLACE}.ttl_after_finished",
            value=spec.ttl_after_finished,
            limit="unset with kind: trainjob, which has no such field",
            fix="delete the job by hand, or use kind: jobset",
        )


def too_large(made: Sequence[Object], spec: KubernetesSpec) -> Iterator[Problem]:
    """Rendered objects that etcd does not store."""
    for item in made:
        size = len(json.dumps(item, separators=(",", ":"), ensure_ascii=False).encode())
        if size > ETCD_BYTES:
            key = max(fields_of(KubernetesSpec), key=lambda one: _bytes_of(spec, one))
            yield Problem(
                path=f"{PLACE}.{key}",
                value=f"{size:,} bytes",
                limit=f"such that the {item['kind']} has at most {ETCD_BYTES:,} bytes, the default"
                " limit of etcd",
                fix=TO_SHORTEN,
            )


def _bytes_of(spec: KubernetesSpec, key: str) -> int:
    name, _, _ = fields_of(KubernetesSpec)[key]
    return len(msgspec.json.encode(getattr(spec, name)))


def missing(spec: KubernetesSpec) -> Iterator[Problem]:
    """What pods need and a plan does not."""
    if spec.image is None:
        yield Problem(
            path=f"{PLACE}.image",
            limit="set: pods need an image that contains ndctl",
            fix="build manifests/image/Containerfile, push it, and add image: REGISTRY/NAME:TAG",
        )
    if spec.runs.claim is None and spec.runs.host_path is None:
        yield Problem(
            path=f"{PLACE}.runs",
            limit="set: all pods write into one run directory",
            fix="add runs: {claim: NAME} for a ReadWriteMany claim, or runs: {host_path: /PATH} for"
            " a file system that is mounted on every node",
        )


def _names(launch: LaunchPlan, spec: KubernetesSpec) -> Iterator[Problem]:
    if (long := too_long_name(spec.kind, launch.job, len(launch.hosts))) is not None:
        yield long
    if "." in (spec.namespace or ""):
        yield Problem(
            path=f"{PLACE}.namespace",
            value=spec.namespace,
            limit="a name without dots",
            fix="`kubectl get namespaces` lists existing ones",
        )


def _environment(spec: KubernetesSpec) -> Iterator[Problem]:
    own = [(name, one if isinstance(one, str) else "") for name, one in spec.env.items()]
    yield from _variables(f"{PLACE}.env", own)
    pod = spec.pod_template.get("spec")
    for key in CONTAINER_LISTS:
        given = pod.get(key) if isinstance(pod, Mapping) else None
        for at, one in enumerate(given if isinstance(given, list) else []):
            said = one.get("env") if isinstance(one, Mapping) else None
            said = said if isinstance(said, list) else []
            listed = [one for one in said if isinstance(one, Mapping)]
            place = f"{PLACE}.pod_template.spec.{key}[{at}].env"
            pairs = [(str(one.get("name")), str(one.get("value", ""))) for one in listed]
            yield from _variables(place, pairs)


def _variables(place: str, given: list[tuple[str, str]]) -> Iterator[Problem]:
    for name, value in given:
        if OPERATORS.fullmatch(name):
            limit = "unset: ndctl and the operator set it per pod"
            yield Problem(path=f"{place}.{name}", value=name, limit=limit, fix="remove it")
        elif not ENV_NAME.fullmatch(name):
            limit = "the name of a variable: letters, digits, _, - and ., first no digit"
            fix = "rename it, as in NCCL_DEBUG"
            yield Problem(path=f"{place}.{name}", value=name, limit=limit, fix=fix)
        elif (size := len(f"{name}={value}".encode())) > LONGEST_VARIABLE:
            limit = f"at most {LONGEST_VARIABLE:,} bytes long as NAME=VALUE, the limit of Linux"
            fix = "shorten it, or put it into a file on a volume"
            yield Problem(path=f"{place}.{name}", value=f"{size:,} bytes", limit=limit, fix=fix)


def _volumes(spec: KubernetesSpec) -> Iterator[Problem]:
    taken = dict.fromkeys(OWN_VOLUMES, "ndctl's own")
    places = {HANDOVER_DIR: "ndctl's own", spec.run_root: "run_root", "/dev/shm": "shm"}
    if spec.shm is None:
        del places["/dev/shm"]
    for at, one in enumerate(spec.volumes):
        place = f"{PLACE}.volumes[{at}]"
        if one.name in taken:
            limit = f"a name that no other volume has ({taken[one.name]} has it)"
            yield Problem(path=f"{place}.name", value=one.name, limit=limit, fix="rename it")
        if "." in one.name or len(one.name) > LABEL_LIMIT:
            limit = f"a name of at most {LABEL_LIMIT}, without dots"
            yield Problem(path=f"{place}.name", value=one.name, limit=limit, fix="rename it")
        if one.mount_path in places:
            limit = f"a path where nothing else is mounted ({places[one.mount_path]} is)"
            fix = "mount it elsewhere"
            yield Problem(path=f"{place}.mount_path", value=one.mount_path, limit=limit, fix=fix)
        taken.setdefault(one.name, f"volumes[{at}]")
        places.setdefault(one.mount_path, f"volumes[{at}]")


def _labels(spec: KubernetesSpec) -> Iterator[Problem]:
    for name, value in spec.labels.items():
        if name in (*names.labels_of_job(""), names.QUEUE_LABEL):
            fix = "remove it" + (": set queue" if name == names.QUEUE_LABEL else "")
            limit = "unset: ndctl sets it"
            yield Problem(path=f"{PLACE}.labels.{name}", value=value, limit=limit, fix=fix)


def _scheduling(spec: KubernetesSpec) -> Iterator[Problem]:
    if spec.gang_scheduler not in (None, "auto", *GANG_SCHEDULERS[spec.kind]):
        yield Problem(
            path=f"{PLACE}.gang_scheduler",
            value=spec.gang_scheduler,
            limit=f"unset with kind: {spec.kind}, which has no such field",
            fix="use queue, for Kueue, or kind: pytorchjob",
        )
    asks = spec.topology
    if asks is not None and asks.slice and (spec.queue is None or spec.kind == "pytorchjob"):
        yield Problem(
            path=f"{PLACE}.topology.slice",
            value=asks.slice,
            limit="unset without queue and with kind: pytorchjob: only Kueue supports it, for"
            " pods of a single template",
            fix="set queue and kind: jobset, or use required or preferred",
        )


def _template(spec: KubernetesSpec) -> Iterator[Problem]:
    place = f"{PLACE}.pod_template"
    yield from strangers(spec.pod_template, place)
    pod = spec.pod_template.get("spec")
    for removed, path in ((spec.pod_template, "spec"), (pod, "containers")):
        # A null would remove what runs the agent.
        if isinstance(removed, Mapping) and path in removed and removed[path] is None:
            where = place if path == "spec" else f"{place}.spec"
            yield Problem(
                path=f"{where}.{path}", limit="set, because pods need it", fix="remove the key"
            )
    for key in (*CONTAINER_LISTS, "volumes"):
        given = pod.get(key) if isinstance(pod, Mapping) else None
        if not isinstance(given, list) or not all(isinstance(one, Mapping) for one in given):
            continue  # already reported
        if not all(isinstance(one.get("name"), str) for one in given):
            limit = "a list of items that each have a name"
            container = names.CONTAINERS[spec.kind]
            fix = f"add name: to each; ndctl's own container is {container}"
            yield Problem(path=f"{place}.spec.{key}", value=_brief(given), limit=limit, fix=fix)
        elif key != "volumes":
            yield from _containers(spec, given, f"{place}.spec.{key}", key == "containers")


def _containers(
    spec: KubernetesSpec, given: Sequence[Mapping[str, Any]], place: str, beside_ours: bool
) -> Iterator[Problem]:
    """A container with another name than ndctl's is an additional one, which needs an image.
    Otherwise the API server refuses the pods, but only after the job was created."""
    own = names.CONTAINERS[spec.kind] if beside_ours else None
    for at, one in enumerate(given):
        if one["name"] == own or one.get("image"):
            image = one.get("image")
            if isinstance(image, str) and not IMAGE.admits(image):
                where, fix = f"{place}[{at}].image", f"write it as in {IMAGE.example}"
                yield Problem(path=where, value=image, limit=str(IMAGE), fix=fix)
            continue
        yield Problem(
            path=f"{place}[{at}].name",
            value=one["name"],
            limit=f"{own}, ndctl's own container, or that of one more with an image of its own"
            if own
            else "that of a container with an image",
            fix=f"did you mean {own}? else add image: REGISTRY/NAME:TAG"
            if own
            else "add image: REGISTRY/NAME:TAG",
        )


def _guaranteed(spec: KubernetesSpec) -> Iterator[Problem]:
    """Settings that prevent QoS class Guaranteed. A single container can do so."""
    if not spec.guaranteed:
        return
    for key, value, example in (("cpu", spec.cpu, "96"), ("memory", spec.memory, "1500Gi")):
        if value is None:
            limit = f"set with guaranteed: true, which reserves {key} for the pod"
            yield Problem(path=f"{PLACE}.{key}", limit=limit, fix=f'for example {key}: "{example}"')
    if spec.cpu is not None and quantity(spec.cpu).denominator != 1:
        limit = "a whole number with guaranteed: true: a fraction of a CPU cannot be exclusive"
        fix = f'for example cpu: "{max(1, math.floor(quantity(spec.cpu)))}"'
        yield Problem(path=f"{PLACE}.cpu", value=spec.cpu, limit=limit, fix=fix)
    pod = spec.pod_template.get("spec")
    for key in CONTAINER_LISTS:
        given = pod.get(key) if isinstance(pod, Mapping) else None
        for at, one in enumerate(given if isinstance(given, list) else []):
            ours = isinstance(one, Mapping) and one.get("name") == names.CONTAINERS[spec.kind]
            base = {"cpu": spec.cpu, "memory": spec.memory} if ours and key == "containers" else {}
            if isinstance(one, Mapping) and not _is_guaranteed(one, base):
                limit = "such that each of cpu and memory has a limit, and the same as request,"
                yield Problem(
                    path=f"{PLACE}.pod_template.spec.{key}[{at}].resources",
                    limit=f"{limit} with guaranteed: true",
                    fix="for example resources: {limits: {cpu: 100m, memory: 64Mi}}",
                )


def _is_guaranteed(container: Mapping[str, Any], base: Mapping[str, Any]) -> bool:
    """`base`: the resources that ndctl itself sets, as requests and limits."""
    resources = container.get("resources")
    resources = resources if isinstance(resources, Mapping) else {}
    found = {}
    for part in ("requests", "limits"):
        more = resources.get(part)
        found[part] = {**base, **(more if isinstance(more, Mapping) else {})}
    return all(
        found["limits"].get(name) is not None
        and quantity(found["requests"].get(name, found["limits"][name]))
        == quantity(found["limits"][name])
        for name in ("cpu", "memory")
    )


def _brief(value: Any) -> Any:
    return value if isinstance(value, (str, int, float, bool)) else type(value).__name__
