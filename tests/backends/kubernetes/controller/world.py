"""Objects as a controller sees them, and a fake cluster that carries out its actions."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from orchestrator.backends.kubernetes.controller.actions import Action, Create, Delete, Patch
from orchestrator.backends.kubernetes.controller.decide import Decision, Scope, Seen, decide
from orchestrator.backends.kubernetes.render import names
from orchestrator.backends.kubernetes.resources import CONFIG_MAPS, JOB_KINDS, Resource, nested
from orchestrator.contract.spec.kubernetes_spec import Kind

Item = dict[str, Any]
HOME = "training"
SCOPE = Scope(home=HOME, namespace=HOME)
CONTAINER = {
    "name": "pytorch",
    "image": "registry.example.org/ndctl:0.1",
    "command": ["/venv/bin/python", "-u", "-m", "task"],
}
LABELS = {names.MANAGED_LABEL: "ndctl"}


def meta(name: str, labels: Mapping[str, str], notes: Mapping[str, str], **more: Any) -> Item:
    uid = f"uid-{name}"
    return {
        "name": name,
        "namespace": HOME,
        "uid": uid,
        "resourceVersion": "1",
        "labels": dict(labels),
        "annotations": dict(notes),
        **more,
    }


def job(
    kind: Kind = "pytorchjob",
    *,
    name: str = "job",
    notes: Mapping[str, str] | None = None,
    suspend: bool = False,
    ended: str = "",
    labels: Mapping[str, str] | None = None,
) -> Item:
    """A job that the controller has adopted."""
    own = {**LABELS, names.JOB_LABEL: name, **(labels or {})}
    said = {names.CONTROLLER_ANNOTATION: HOME, **(notes or {})}
    spec = nested(JOB_KINDS[kind].suspend, suspend)["spec"]
    if kind == "pytorchjob":
        spec["pytorchReplicaSpecs"] = {"Master": {"template": {"spec": {}}}}
    conditions = [{"type": ended, "status": "True"}] if ended else []
    return {"metadata": meta(name, own, said), "spec": spec, "status": {"conditions": conditions}}


def pod(
    name: str = "pod",
    *,
    of: str = "job",
    on: str = "node1",
    leaving: bool = False,
    phase: str = "Running",
    notes: Mapping[str, str] | None = None,
    managed_by: str = "ndctl",
) -> Item:
    labels = {names.MANAGED_LABEL: managed_by, names.JOB_LABEL: of}
    gone = {"deletionTimestamp": "2026-01-01T00:00:00Z"} if leaving else {}
    return {
        "metadata": meta(name, labels, notes or {}, **gone),
        "spec": {"nodeName": on, "priorityClassName": "high", "containers": [dict(CONTAINER)]},
        "status": {"phase": phase},
    }


def node(name: str = "node1", ready: str = "True") -> Item:
    made: Item = {"metadata": meta(name, {}, {}), "spec": {}}
    del made["metadata"]["namespace"]
    made["status"] = {"conditions": [{"type": "Ready", "status": ready, "reason": "Because"}]}
    return made


def config_map(
    of: str = "job", *, owned: bool = False, asks: Mapping[str, str] | None = None
) -> Item:
    """`asks`: the request that the pods of the job wrote into their ConfigMap."""
    labels = {**LABELS, names.JOB_LABEL: of}
    owner = {"name": of, "uid": f"uid-{of}"}
    more = {"ownerReferences": [owner]} if owned or asks else {}
    return {"metadata": meta(f"{of}-launch", labels, asks or {}, **more)}


def seen(
    *jobs: Item, kind: Kind = "pytorchjob", asks: Mapping[str, str] | None = None, **more: Any
) -> Seen:
    """What a controller sees. `asks`: the request of the pods of `job`."""
    maps = more.pop("config_maps", (config_map(asks=asks),) if asks else ())
    beside = {CONFIG_MAPS: maps, **more.pop("beside", {})}
    nodes = more.pop("nodes", (node(),))
    return Seen(jobs={kind: jobs}, nodes=nodes, beside=beside, **more)


def decided(what: Seen, scope: Scope = SCOPE) -> tuple[Action, ...]:
    """The actions without those that wait until their cause has lasted."""
    return tuple(one for chain in decide(what, scope, {}, 0.0).chains for one in chain)


@dataclass
class World:
    """Carries out actions at once, like the API server and the operators."""

    seen: Seen
    scope: Scope = SCOPE
    since: Mapping[str, float] = field(default_factory=dict)
    now: float = 0.0

    def round(self) -> Decision:
        decision = decide(self.seen, self.scope, self.since, self.now)
        self.since = decision.since
        for chain in decision.chains:
            for action in chain:
                self.obey(action)
        self._operators()
        return decision

    def obey(self, action: Action) -> None:
        if isinstance(action, Patch):
            self._each(action.what.resource, action.what.uid, action.change)
        elif isinstance(action, Create):
            about = {**action.item["metadata"], "uid": "uid-" + action.what.name}
            made = {**action.item, "metadata": {**about, "resourceVersion": "1"}}
            self.seen = replace(self.seen, pods=(*self.seen.pods, made))
        elif isinstance(action, Delete):
            self._each(action.what.resource, action.what.uid, None)

    def _each(self, resource: Resource, uid: str, change: Mapping[str, Any] | None) -> None:
        def after(items: Any) -> Any:
            found = []
            for item in items:
                if item["metadata"]["uid"] != uid:
                    found.append(item)
                elif change is not None:
                    changed = merge(item, change)
                    version = int(item["metadata"]["resourceVersion"]) + 1
                    changed["metadata"]["resourceVersion"] = str(version)
                    found.append(changed)
            return tuple(found)

        match resource.kind:
            case "Pod":
                self.seen = replace(self.seen, pods=after(self.seen.pods))
            case _ if resource in self.seen.beside:
                beside = {**self.seen.beside, resource: after(self.seen.beside[resource])}
                self.seen = replace(self.seen, beside=beside)
            case "Node":
                self.seen = replace(self.seen, nodes=after(self.seen.nodes))
            case _:
                jobs = {kind: after(items) for kind, items in self.seen.jobs.items()}
                self.seen = replace(self.seen, jobs=jobs)

    def _operators(self) -> None:
        """Operators delete the pods of suspended jobs."""
        gone = {
            each["metadata"]["name"]
            for kind, items in self.seen.jobs.items()
            for each in items
            if _at(each, JOB_KINDS[kind].suspend) is True
        }
        labelled = [(p["metadata"]["labels"].get(names.JOB_LABEL), p) for p in self.seen.pods]
        pods = [pod for of, pod in labelled if of not in gone]
        self.seen = replace(self.seen, pods=tuple(pods))


def _at(item: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        item = item.get(key, {})
    return item


def merge(base: Any, change: Mapping[str, Any]) -> Any:
    """JSON merge patch (RFC 7386)."""
    found = dict(base) if isinstance(base, Mapping) else {}
    for key, value in change.items():
        if value is None:
            found.pop(key, None)
        elif isinstance(value, Mapping):
            found[key] = merge(found.get(key), value)
        else:
            found[key] = value
    return found
