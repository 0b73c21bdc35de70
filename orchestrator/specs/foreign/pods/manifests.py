"""Manifests of Kubernetes that create pods which train together, as groups of pods."""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import yaml
from msgspec import Struct, field

from orchestrator.contract.read_json import read_json_values
from orchestrator.errors import SpecError
from orchestrator.specs.foreign.pods.wrong_types import without_nulls
from orchestrator.yaml_document import refuse_deep, syntax_errors

TRAINS = "trainer.kubeflow.org/trainjob-ancestor-step"
"""The label of the pods of a runtime that get a TrainJob's `trainer`."""
MOST_VALUES = 20_000
"""In all objects with pods. Aliases may make a short text very large."""
DEEPEST = 100
"""A template of a pod is about ten levels deep."""


class Pods(Struct, kw_only=True):
    """Pods with one template, which run the same program."""

    hosts: Any = 1
    """A number, or text with a variable."""
    template: Mapping[str, Any] = field(default_factory=dict)
    ranks: Any = None
    """Ranks in each pod; None: not said."""
    command: list[str] | None = None
    """Replaces the command of the template."""
    launcher: Mapping[str, Any] | None = None
    """The container that runs `command`, if it is in another pod."""
    notes: list[str] = field(default_factory=list)
    group: Any = None
    """Pods of one child Job, if a JobSet has several of them."""
    says_devices: bool = True
    """Pods get no other devices than those of the template."""
    kind: str = "pytorchjob"
    """The kind that a spec of ndctl asks for."""


def objects_in(text: str) -> list[dict[str, Any]]:
    """The objects of a manifest; none if the text is not YAML, too large or too deep. Those without
    pods have only their names."""
    objects = _objects(text)
    if _are_too_large(objects):
        return []
    return [without_nulls(one) if reads(one) else _named(one) for one in objects]


def is_too_large(text: str) -> bool:
    """Whether the objects with pods have too many values, or are too deep."""
    return _are_too_large(_objects(text))


def _are_too_large(objects: list[dict[str, Any]]) -> bool:
    budget = [MOST_VALUES]
    return not all(_is_small(one, budget) for one in objects if reads(one))


def _objects(text: str) -> list[dict[str, Any]]:
    return [one for part in _documents(text) for one in _items(part)]


def _named(one: Mapping[str, Any]) -> dict[str, Any]:
    kind, name = one.get("kind"), at(one, "metadata", "name")
    named = {"metadata": {"name": name}} if isinstance(name, str) else {}
    return {"kind": kind, **named} if isinstance(kind, str) else named


def _documents(text: str) -> list[Any]:
    try:
        return documents_in(text, "")
    except SpecError:
        return []


def documents_in(text: str, source: str) -> list[Any]:
    """The values of a text of YAML documents, or of JSON. `source` names it in messages.

    Raises:
        SpecError: it is neither; with line and column.
    """
    of_json: ValueError | None = None
    if is_braced(text):
        try:
            return read_json_values(text)
        except ValueError as exc:  # it may be YAML
            of_json = exc
    loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        with syntax_errors(text, source):
            refuse_deep(text, source)
            return [*yaml.load_all(text, Loader=loader)]
    except SpecError as exc:
        if not isinstance(of_json, json.JSONDecodeError):
            raise
        place = f"{source}:{of_json.lineno}:{of_json.colno}"
        fix = "check commas, quotes and brackets there"
        raise SpecError(f"{place}: not JSON: {of_json.msg}", fix=fix) from exc
    except (ValueError, RecursionError) as exc:  # such as a date without such a day
        message = f"{source}: not YAML: {exc}"
        raise SpecError(message, fix="quote the value, or correct it") from exc


def is_braced(text: str) -> bool:
    """Whether a text starts as JSON does. One with `{{` is a template."""
    return re.match(r"\s*\{(?!\{)", text) is not None


def reads(one: Mapping[str, Any]) -> bool:
    """Whether the pods of this object, or of one that names it, may become a spec."""
    kind = str(one.get("kind"))
    return _key(one) in KINDS or "TrainingRuntime" in kind


def _key(one: Mapping[str, Any]) -> tuple[str, str]:
    return str(one.get("apiVersion", "")).partition("/")[0], str(one.get("kind"))


def _items(part: Any) -> list[dict[str, Any]]:
    if not isinstance(part, dict):
        return []
    items = part.get("items")
    if str(part.get("kind")).endswith("List") and isinstance(items, list):
        return [one for one in items if isinstance(one, dict)]
    return [part]


def _is_small(value: Any, budget: list[int], depth: int = 0) -> bool:
    budget[0] -= 1
    if budget[0] < 0 or depth > DEEPEST:
        return False
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return all(_is_small(one, budget, depth + 1) for one in inside)


def looks_like_manifest(text: str) -> bool:
    """Whether a text is for Kubernetes, also if it is a template or has several objects, or is
    JSON."""
    keys = ("apiVersion", "kind")
    if is_braced(text):
        return any(isinstance(one, dict) and {*keys} <= one.keys() for one in _documents(text))
    return all(re.search(rf"^{key}:", text, re.MULTILINE) for key in keys)


def pods_of(one: Mapping[str, Any], others: list[dict[str, Any]]) -> Pods | None:
    """The pods that the object `one` creates; None: ndctl does not know the kind.

    Args:
        others: all objects of the file; a TrainJob may name one of them.
    """
    read = KINDS.get(_key(one))
    spec = one.get("spec")
    if read is None or not isinstance(spec, dict):
        return None
    if read is _trainjob:
        return _trainjob(spec, others)
    return read(spec)


def at(value: Any, *keys: str) -> Any:
    """The value inside mappings, or None."""
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _pytorchjob(spec: dict[str, Any]) -> Pods:
    replicas = at(spec, "pytorchReplicaSpecs") or {}
    given = [
        replicas[name]
        for name in ("Master", "Worker")
        if isinstance(replicas, dict) and replicas.get(name)
    ]
    counts = [at(one, "replicas") if at(one, "replicas") is not None else 1 for one in given]
    notes = []
    if len({repr(at(one, "template", "spec")) for one in given}) > 1:
        notes.append("where the Master's pods differ from the Worker's: all hosts are alike")
    if at(spec, "elasticPolicy"):
        notes.append("elasticPolicy: with resilience.shrink the job continues on fewer hosts")
    ranks = at(spec, "nprocPerNode")
    template = at(given[-1], "template") if given else {}
    return Pods(
        hosts=_total(counts, notes),
        template=template or {},
        ranks=ranks if ranks not in ("auto", "gpu", "cpu") else None,
        notes=notes,
    )


def _hyperpod(spec: dict[str, Any]) -> Pods:
    groups = [one for one in at(spec, "replicaSpecs") or [] if isinstance(one, dict)]
    notes: list[str] = []
    if any(at(one, "spares") for one in groups):
        notes.append("spares of replicaSpecs: set cluster.spare_hosts")
    if at(spec, "runPolicy", "logMonitoringConfiguration"):
        notes.append("logMonitoringConfiguration: ndctl watches steps and hangs itself")
    return Pods(
        hosts=_total([one.get("replicas", 1) for one in groups], notes),
        template=at(groups[-1], "template") or {} if groups else {},
        ranks=at(spec, "nprocPerNode"),
        notes=notes,
    )


def _total(counts: list[Any], notes: list[str]) -> Any:
    if all(isinstance(one, int) for one in counts):
        return sum(counts) or 1
    if len(counts) == 1:
        return counts[0]
    notes.append(f"the number of hosts, {' + '.join(map(str, counts))}: set cluster.hosts")
    return 1


def _jobset(spec: dict[str, Any]) -> Pods:
    groups = [one for one in at(spec, "replicatedJobs") or [] if isinstance(one, dict)]
    sized = [(_times(one), one) for one in groups]
    if not sized:
        return Pods(kind="jobset")

    # The one that trains has the most pods; a launcher or a parameter server has one. What prepares
    # data has no GPUs, and comes first.
    def order(pair: tuple[Any, dict[str, Any]]) -> tuple[bool, Any, bool]:
        hosts, one = pair
        trains = at(one, "template", "metadata", "labels", TRAINS) == "trainer"
        asks = "gpu" in str(at(one, "template", "spec", "template", "spec", "containers"))
        return trains, hosts if isinstance(hosts, int) else MOST_VALUES, asks

    hosts, most = max(reversed(sized), key=order)
    notes = [f"replicatedJob {one.get('name')}" for one in groups if one is not most]
    if at(spec, "coordinator"):
        notes.append("coordinator: MASTER_ADDR of each rank is the first host")
    template = at(most, "template", "spec", "template") or {}
    alone = at(most, "replicas") in (None, 1)
    group = None if alone else at(most, "template", "spec", "parallelism") or 1
    return Pods(hosts=hosts, template=template, notes=notes, group=group, kind="jobset")


def _times(one: Mapping[str, Any]) -> Any:
    counts = [at(one, "replicas"), at(one, "template", "spec", "parallelism")]
    known = [count for count in counts if count not in (None, 1)]
    if all(isinstance(count, int) for count in known):
        product = 1
        for count in known:
            product *= count
        return product
    return known[0]


def _runtime(spec: dict[str, Any]) -> Pods:
    found = _jobset(at(spec, "template", "spec") or {})
    policy = at(spec, "mlPolicy") or {}
    ranks = next(
        (at(policy, key, "numProcPerNode") for key in ("torch", "mpi", "jax") if at(policy, key)),
        None,
    )
    found.hosts = at(policy, "numNodes") or found.hosts
    found.ranks = ranks if ranks not in ("auto", "gpu", "cpu") else None
    found.kind = "trainjob"
    if at(spec, "podGroupPolicy", "volcano") is not None:
        pod = {"schedulerName": "volcano", **(at(found.template, "spec") or {})}
        found.template = {**found.template, "spec": pod}
    elif groups := at(spec, "podGroupPolicy"):
        found.notes.append(f"podGroupPolicy {', '.join(groups)}: set gang_scheduler")
    return found


def _trainjob(spec: dict[str, Any], others: list[dict[str, Any]]) -> Pods:
    name = at(spec, "runtimeRef", "name")
    runtime = next(
        (
            one
            for one in others
            if "TrainingRuntime" in str(one.get("kind")) and at(one, "metadata", "name") == name
        ),
        None,
    )
    found = Pods(kind="trainjob") if runtime is None else _runtime(at(runtime, "spec") or {})
    if runtime is None:
        found.says_devices = False
        found.notes.append(
            f"what the runtime {name} adds, such as volumes and tolerations: it is not in this"
            " file. Put its manifest into the same file, after ---"
        )
    trainer = at(spec, "trainer") or {}
    container = dict(_container(found.template))
    container.update({key: trainer[key] for key in ("image", "command", "args") if key in trainer})
    container["env"] = [*(container.get("env") or []), *(trainer.get("env") or [])]
    if "resourcesPerNode" in trainer:
        # It takes the place of all that the runtime asks for.
        container["resources"] = trainer["resourcesPerNode"]
        found.says_devices = True
    pod = {**(at(found.template, "spec") or {}), "containers": [container]}
    found.template = {**found.template, "spec": pod}
    found.hosts = trainer.get("numNodes") or found.hosts
    ranks = trainer.get("numProcPerNode")
    found.ranks = found.ranks if ranks in (None, "auto", "gpu", "cpu") else ranks
    more = ("initializer", "podTemplateOverrides", "podSpecOverrides", "runtimePatches")
    found.notes += [key for key in more if spec.get(key)]
    return found


def _container(template: Mapping[str, Any]) -> dict[str, Any]:
    found = at(template, "spec", "containers") or [{}]
    return found[0] if isinstance(found[0], dict) else {}


def _mpijob(spec: dict[str, Any]) -> Pods:
    notes = ["the Launcher and ssh: ndctl starts the ranks itself, and mpirun's options"]
    replicas = at(spec, "mpiReplicaSpecs")
    if replicas is None and at(spec, "template"):  # v1alpha1
        total = at(spec, "gpus") or at(spec, "processingUnits")
        hosts = at(spec, "replicas") or (f"{total} GPUs" if total else 1)
        return Pods(hosts=hosts, template=spec["template"], notes=notes)
    launcher, worker = (at(replicas, role, "template") or {} for role in ("Launcher", "Worker"))
    notes += _left_of("Launcher", launcher, worker, keys=("volumeMounts",))
    command = _container(launcher)
    return Pods(
        hosts=at(replicas, "Worker", "replicas") or 1,
        template=worker,
        ranks=at(spec, "slotsPerWorker"),
        command=[*(command.get("command") or []), *(command.get("args") or [])],
        launcher=command,
        notes=notes,
    )


def _left_of(
    role: str, template: Any, trains: Any, keys: tuple[str, ...] = ("env", "volumeMounts")
) -> Iterator[str]:
    """What the pods of another role have, and those with the template `trains` do not."""
    own, other = _container(template), _container(trains)
    for key, name, what in (("env", "name", "variables"), ("volumeMounts", "mountPath", "volumes")):
        if key not in keys:
            continue
        there = other.get(key) or []
        named = [str(at(one, name)) for one in own.get(key) or [] if one not in there]
        if named:
            here = "env" if key == "env" else "volumes"
            yield (
                f"{what} of the {role}, {', '.join(named)}: write those that ranks need to"
                f" cluster.kubernetes.{here}"
            )


def _rayjob(spec: dict[str, Any]) -> Pods:
    cluster = at(spec, "rayClusterSpec") or {}
    workers = [one for one in at(cluster, "workerGroupSpecs") or [] if isinstance(one, dict)]
    one = workers[0] if workers else at(cluster, "headGroupSpec") or {}
    notes = ["the Ray cluster: ndctl starts the program itself on each rank, without Ray"]
    if workers:
        head = at(cluster, "headGroupSpec", "template") or {}
        notes += _left_of("head", head, at(one, "template") or {})
    notes += [f"workerGroup {at(other, 'groupName')}: all hosts are alike" for other in workers[1:]]
    entrypoint = str(at(spec, "entrypoint") or "")  # Ray hands it to a shell
    if at(spec, "runtimeEnvYAML"):
        notes.append(
            "runtimeEnvYAML: packages and files belong into the image, its env_vars into run.env"
        )
    return Pods(
        hosts=one.get("replicas") or one.get("minReplicas") or 1,
        template=one.get("template") or {},
        command=["sh", "-c", entrypoint] if entrypoint else [],
        notes=notes,
    )


def _job(spec: dict[str, Any]) -> Pods:
    return Pods(hosts=at(spec, "parallelism") or 1, template=at(spec, "template") or {})


def _pod(spec: dict[str, Any]) -> Pods:
    return Pods(template={"spec": spec})


def _volcano(spec: dict[str, Any]) -> Pods:
    tasks = [one for one in at(spec, "tasks") or [] if isinstance(one, dict)]
    notes = (
        ["plugins of Volcano: ndctl brings the ranks together itself"]
        if at(spec, "plugins")
        else []
    )
    launcher = next((one for one in tasks if "mpiexec" in str(one) or "mpirun" in str(one)), None)
    workers = [one for one in tasks if one is not launcher or len(tasks) == 1]
    hosts = _total([one.get("replicas", 1) for one in workers], notes)
    if len({repr(at(one, "template", "spec")) for one in workers}) > 1:
        names = ", ".join(str(one.get("name")) for one in workers)
        notes.append(f"where the pods of the tasks {names} differ: all hosts are alike")
    found = Pods(
        hosts=hosts, template=workers[-1].get("template") or {} if workers else {}, notes=notes
    )
    if launcher is not None and launcher not in workers:
        container = _container(launcher.get("template") or {})
        found.command = [*(container.get("command") or []), *(container.get("args") or [])]
        found.launcher = container
        notes.append(f"the task {launcher.get('name')}: ndctl starts the ranks itself")
    return found


def _leaderworkerset(spec: dict[str, Any]) -> Pods:
    group = at(spec, "leaderWorkerTemplate") or {}
    notes = []
    if at(spec, "replicas") not in (None, 1):
        notes.append("replicas: a job is one group; submit one job for each")
    if at(group, "leaderTemplate"):
        notes.append("leaderTemplate: all hosts are alike")
    return Pods(
        hosts=at(group, "size") or 1, template=at(group, "workerTemplate") or {}, notes=notes
    )


KINDS: Mapping[tuple[str, str], Callable[..., Pods]] = {
    ("kubeflow.org", "PyTorchJob"): _pytorchjob,
    ("jobset.x-k8s.io", "JobSet"): _jobset,
    ("trainer.kubeflow.org", "TrainJob"): _trainjob,
    ("trainer.kubeflow.org", "ClusterTrainingRuntime"): _runtime,
    ("trainer.kubeflow.org", "TrainingRuntime"): _runtime,
    ("kubeflow.org", "MPIJob"): _mpijob,
    ("ray.io", "RayJob"): _rayjob,
    ("batch", "Job"): _job,
    ("v1", "Pod"): _pod,
    ("sagemaker.amazonaws.com", "HyperPodPyTorchJob"): _hyperpod,
    ("batch.volcano.sh", "Job"): _volcano,
    ("leaderworkerset.x-k8s.io", "LeaderWorkerSet"): _leaderworkerset,
}
"""Group and kind of a manifest -> how its pods are found."""


def training_in(text: str) -> Iterator[tuple[dict[str, Any], Pods]]:
    """Each object of a manifest that trains, and its pods. Jobs come before single pods, and those
    before runtimes, which only describe."""
    objects = objects_in(text)
    found = [(one, pods) for one in objects if (pods := pods_of(one, objects)) is not None]

    def order(pair: tuple[dict[str, Any], Pods]) -> int:
        kind = str(pair[0].get("kind"))
        return 2 if "Runtime" in kind else int(kind == "Pod")

    yield from sorted(found, key=order)
