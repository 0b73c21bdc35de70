"""What Kubernetes, or its operator, would refuse or silently drop. Pure."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from orchestrator.backends.kubernetes.render import names
from orchestrator.backends.kubernetes.render.pods import CONTAINER_LISTS, HANDOVER_DIR, spec_of
from orchestrator.contract.codec import Invalid, Problem
from orchestrator.contract.handover import Handover
from orchestrator.contract.kubernetes import Kind, KubernetesSpec
from orchestrator.contract.launch import LaunchPlan
from orchestrator.errors import SpecError

PLACE = "cluster.kubernetes"
OPERATORS = re.compile(
    r"PET_.*|NDCTL_.*|RANK|LOCAL_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|MASTER_ADDR|MASTER_PORT"
    r"|JOB_COMPLETION_INDEX|TORCHELASTIC_.*"
)
ENV_NAME = re.compile(r"[-._a-zA-Z][-._a-zA-Z0-9]*")
LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
LABEL_NAME = re.compile(
    r"([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
)
GANG_SCHEDULERS: Mapping[Kind, tuple[str, ...]] = {
    "pytorchjob": ("volcano", "coscheduling"),
    "trainjob": ("coscheduling",),
    "jobset": (),
}
OWN_VOLUMES = ("submission", "runs", "shm")


def refuse(handover: Handover) -> None:
    """Raises SpecError with everything that is wrong, each with its place, value, limit and fix."""
    found = tuple(problems(handover.launch))
    if found:
        raise SpecError("\n".join(str(one) for one in found)) from Invalid(found)


def problems(launch: LaunchPlan) -> Iterator[Problem]:
    spec = spec_of(launch)
    yield from _missing(spec)
    yield from _names(launch, spec)
    yield from _environment(spec)
    yield from _volumes(spec)
    yield from _labels(spec)
    yield from _scheduling(spec)
    yield from _template(spec)


def _missing(spec: KubernetesSpec) -> Iterator[Problem]:
    if spec.image is None:
        yield Problem(
            path=f"{PLACE}.image",
            limit="given: pods need an image with ndctl in it",
            fix="build manifests/image/Containerfile, push it, and add image: REGISTRY/NAME:TAG",
        )
    if spec.runs.claim is None and spec.runs.host_path is None:
        yield Problem(
            path=f"{PLACE}.runs",
            limit="given: all pods write into one run directory",
            fix="add runs: {claim: NAME} for a ReadWriteMany claim, or runs: {host_path: /PATH} for"
            " a file system that is mounted on every node",
        )


def _names(launch: LaunchPlan, spec: KubernetesSpec) -> Iterator[Problem]:
    longest = names.longest_pod_name(spec.kind, launch.job, len(launch.hosts))
    over = len(longest) - names.LABEL_LIMIT
    if over > 0:
        yield Problem(
            path="name",
            value=launch.job,
            limit=f"at most {len(launch.job) - over} long here: a pod would be called {longest},"
            f" and a host name has at most {names.LABEL_LIMIT}",
            fix=f"shorten it by {over}",
        )
    if "." in (spec.namespace or ""):
        yield Problem(
            path=f"{PLACE}.namespace",
            value=spec.namespace,
            limit="a name without dots",
            fix="`kubectl get namespaces` shows those that there are",
        )


def _environment(spec: KubernetesSpec) -> Iterator[Problem]:
    yield from _variables(f"{PLACE}.env", list(spec.env))
    pod = spec.pod_template.get("spec")
    for key in CONTAINER_LISTS:
        given = pod.get(key) if isinstance(pod, Mapping) else None
        for at, one in enumerate(given if isinstance(given, list) else []):
            said = one.get("env") if isinstance(one, Mapping) else None
            listed = [each.get("name") for each in said or [] if isinstance(each, Mapping)]
            place = f"{PLACE}.pod_template.spec.{key}[{at}].env"
            yield from _variables(place, [str(name) for name in listed])


def _variables(place: str, given: list[str]) -> Iterator[Problem]:
    for name in given:
        if OPERATORS.fullmatch(name):
            limit = "left to ndctl and the operator, which tell each pod its own"
            yield Problem(path=f"{place}.{name}", value=name, limit=limit, fix="remove it")
        elif not ENV_NAME.fullmatch(name):
            limit = "the name of a variable: letters, digits, _, - and ., first no digit"
            fix = "rename it, as in NCCL_DEBUG"
            yield Problem(path=f"{place}.{name}", value=name, limit=limit, fix=fix)


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
        if "." in one.name or len(one.name) > names.LABEL_LIMIT:
            limit = f"a name of at most {names.LABEL_LIMIT}, without dots"
            yield Problem(path=f"{place}.name", value=one.name, limit=limit, fix="rename it")
        if one.mount_path in places:
            limit = f"a path where nothing else is mounted ({places[one.mount_path]} is)"
            fix = "mount it elsewhere"
            yield Problem(path=f"{place}.mount_path", value=one.mount_path, limit=limit, fix=fix)
        taken.setdefault(one.name, f"volumes[{at}]")
        places.setdefault(one.mount_path, f"volumes[{at}]")


def _labels(spec: KubernetesSpec) -> Iterator[Problem]:
    given = {"labels": spec.labels, "node_selector": spec.node_selector}
    for key, mapping in given.items():
        for name, value in mapping.items():
            if not (LABEL_NAME.fullmatch(name) and LABEL_VALUE.fullmatch(value)):
                limit = "a label: name of at most 63 (PREFIX/ before it), value of at most 63, of"
                yield Problem(
                    path=f"{PLACE}.{key}.{name}",
                    value=value,
                    limit=f"{limit} letters, digits, -, _ and ., at both ends a letter or digit",
                    fix="shorten or rename it; free text goes into annotations",
                )
            if key == "labels" and name in (*names.labels_of_job(""), names.QUEUE_LABEL):
                fix = "remove it" + (": set queue" if name == names.QUEUE_LABEL else "")
                limit = "left to ndctl"
                yield Problem(path=f"{PLACE}.labels.{name}", value=value, limit=limit, fix=fix)


def _scheduling(spec: KubernetesSpec) -> Iterator[Problem]:
    if spec.gang_scheduler is not None and spec.gang_scheduler not in GANG_SCHEDULERS[spec.kind]:
        yield Problem(
            path=f"{PLACE}.gang_scheduler",
            value=spec.gang_scheduler,
            limit=f"left out with kind: {spec.kind}, which cannot ask for it",
            fix="use queue, for Kueue, or kind: pytorchjob",
        )
    asks = spec.topology
    if asks is not None and asks.slice and (spec.queue is None or spec.kind == "pytorchjob"):
        yield Problem(
            path=f"{PLACE}.topology.slice",
            value=asks.slice,
            limit="left out without queue, and with kind: pytorchjob: Kueue alone can do it, for"
            " pods that are all of one kind",
            fix="set queue and kind: jobset, or use required or preferred",
        )


def _template(spec: KubernetesSpec) -> Iterator[Problem]:
    """Whether the patch has the shape of a pod template; the API server checks the rest."""
    place = f"{PLACE}.pod_template"
    for key, value in spec.pod_template.items():
        if key not in ("metadata", "spec") or not isinstance(value, Mapping):
            limit = "metadata or spec, with key: value pairs below it, as in a pod template"
            fix = "for example pod_template: {spec: {schedulerName: volcano}}"
            yield Problem(path=f"{place}.{key}", value=_brief(value), limit=limit, fix=fix)
    pod = spec.pod_template.get("spec")
    for key in (*CONTAINER_LISTS, "volumes"):
        given = pod.get(key) if isinstance(pod, Mapping) else None
        named = isinstance(given, list) and all(
            isinstance(one, Mapping) and isinstance(one.get("name"), str) for one in given
        )
        if given is not None and not named:
            limit = "a list of things that have a name each"
            container = names.CONTAINERS[spec.kind]
            fix = f"add name: to each; ndctl's own container is {container}"
            yield Problem(path=f"{place}.spec.{key}", value=_brief(given), limit=limit, fix=fix)


def _brief(value: Any) -> Any:
    return value if isinstance(value, (str, int, float, bool)) else type(value).__name__
