"""What of a Kubernetes cluster, and of what one may do there, would stop a job. Only asks."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from orchestrator.backends.kubernetes.api import Listed
from orchestrator.backends.kubernetes.checks import lacking, references, to_create
from orchestrator.backends.kubernetes.inventory import KUEUE, kueue_levels
from orchestrator.backends.kubernetes.refusals import Forbidden, Missing
from orchestrator.backends.kubernetes.resources import (
    ACCOUNTS,
    CLAIMS,
    CONFIG_MAPS,
    EVENTS,
    JOB_KINDS,
    NAMESPACES,
    NODES,
    PODS,
    PRIORITIES,
    ROLE_BINDINGS,
    ROLES,
    RUNTIMES,
    SECRETS,
    Object,
    Resource,
    lookup,
)
from orchestrator.backends.kubernetes.standards import (
    INIT_CONTAINER,
    level_of,
    privileges,
    to_allow,
)
from orchestrator.cluster.kubernetes.nodes import parse_node
from orchestrator.cluster.kubernetes.standing import shut
from orchestrator.cluster.kubernetes.taints import tolerations_of
from orchestrator.contract.findings import Finding, Verdict
from orchestrator.contract.kubernetes import KubernetesSpec
from orchestrator.errors import BackendError

RUN = ("get", "list", "watch", "create", "patch", "delete")
MAKE = ("get", "create", "patch", "delete")
GONE = ("get", "list", "watch", "deletecollection")
"""Of pods: a former launch's are taken away together."""
SHARED = "ReadWriteMany"


class Asks(Protocol):
    """What of `Api` is used here."""

    @property
    def context(self) -> str: ...
    @property
    def namespace(self) -> str: ...
    @property
    def server(self) -> str: ...
    def read(self, path: str) -> Any: ...
    def get(self, resource: Resource, namespace: str | None, name: str) -> Object | None: ...
    def list(
        self, resource: Resource, namespace: str | None, *, labels: str = "", fields: str = ""
    ) -> Listed: ...
    def create(self, item: Object, namespace: str) -> Object: ...


@dataclass(frozen=True, slots=True)
class Right:
    verb: str
    resource: Resource
    sub: str = ""
    without: Verdict = "stops"
    """`stops`: nothing runs without; `warns`: something cannot be seen or done from here."""

    @property
    def word(self) -> str:
        return self.resource.word + (f"/{self.sub}" if self.sub else "")


def examine_kubernetes(
    api: Asks, spec: KubernetesSpec, hosts: int | None = None
) -> tuple[Finding, ...]:
    """Every check; with the number of a job's `hosts`, also what that job's spec names."""
    try:
        return tuple(_examined(api, spec, hosts))
    except BackendError as exc:
        return (Finding(what="api server", verdict="stops", found=exc.message, fix=exc.fix),)


def _examined(api: Asks, spec: KubernetesSpec, hosts: int | None) -> Iterator[Finding]:
    version = str(api.read("/version").get("gitVersion", "of unknown version"))
    found = f"Kubernetes {version} at {api.server}, context {api.context}"
    yield Finding(what="api server", verdict="ok", found=found)
    namespace = spec.namespace or api.namespace
    yield from _kinds(api, spec)
    yield from _namespace(api, spec, namespace, hosts)
    yield from _rights(api, spec, namespace)
    yield from _named(api, spec, namespace, hosts)
    yield _devices(api, spec)
    yield from _kueue(api, spec, namespace)


def _kinds(api: Asks, spec: KubernetesSpec) -> Iterator[Finding]:
    for name, kind in JOB_KINDS.items():
        resource = kind.resource
        versions = _versions(api, resource)
        what, found = resource.kind.lower(), f"{resource.word} {', '.join(versions)}".strip()
        if resource.version in versions:
            yield Finding(what=what, verdict="ok", found=found)
            continue
        found = f"served as {found}" if versions else f"{kind.operator} is not installed"
        if name != spec.kind:
            yield Finding(what=what, verdict="note", found=found)
            continue
        yield Finding(
            what=what,
            verdict="stops",
            found=f"{found}; cluster.kubernetes.kind={name} needs {resource.version} of it",
            fix=f"{kind.install}  (as an administrator), or set cluster.kubernetes.kind to one"
            " that is there",
        )


def _versions(api: Asks, resource: Resource) -> list[str]:
    """In which `resource` is served; none where it is not."""
    try:
        group = api.read(f"/apis/{resource.group}")
        served = [one["version"] for one in group["versions"]]
        return [
            version
            for version in served
            if any(
                one["name"] == resource.plural
                for one in api.read(f"/apis/{resource.group}/{version}").get("resources", ())
            )
        ]
    except Missing:
        return []


def _namespace(
    api: Asks, spec: KubernetesSpec, namespace: str, hosts: int | None
) -> Iterator[Finding]:
    try:
        there = api.get(NAMESPACES, None, namespace)
    except Forbidden:
        found = f"{namespace}; whether it exists may not be asked"
        yield Finding(what="namespace", verdict="note", found=found)
        return
    if there is None:
        fix = f"kubectl create namespace {namespace}, or set cluster.kubernetes.namespace"
        found = f"there is no namespace {namespace}"
        yield Finding(what="namespace", verdict="stops", found=found, fix=fix)
        return
    phase = lookup(there, ("status", "phase"), "Active")
    if phase != "Active":
        fix = "wait until it is gone, and create it again"
        found = f"{namespace} is {phase}"
        yield Finding(what="namespace", verdict="stops", found=found, fix=fix)
        return
    yield Finding(what="namespace", verdict="ok", found=namespace)
    yield from _security(there, spec, namespace, hosts)


def _security(
    there: Object, spec: KubernetesSpec, namespace: str, hosts: int | None
) -> Iterator[Finding]:
    """Whether the job's pods would be let in."""
    level, what = level_of(there), "pod security"
    asked = privileges(spec) if hosts is not None else ()
    found = f"pods of {namespace} have to keep to the standard {level}"
    if level == "privileged":
        return
    if asked:
        keys = ", ".join(f"cluster.kubernetes.{key}" for key in asked)
        fix = f"{to_allow('privileged', namespace)}  (as an administrator), or leave them out"
        yield Finding(what=what, verdict="stops", found=f"{found}, which forbids {keys}", fix=fix)
    elif level == "restricted" and spec.kind == "pytorchjob" and hosts != 1:
        fix = f"{to_allow('baseline', namespace)}  (as an administrator)"
        found = f"{found}: {INIT_CONTAINER}"
        yield Finding(what=what, verdict="warns", found=found, fix=fix)
    else:
        yield Finding(what=what, verdict="ok", found=found)


def needed(spec: KubernetesSpec) -> tuple[Right, ...]:
    """What somebody who submits, watches and cancels jobs has to be allowed in the namespace."""
    made = [SECRETS, CONFIG_MAPS, *([RUNTIMES] if spec.kind == "trainjob" else [])]
    given: tuple[Right, ...] = ()
    if spec.service_account is None:
        made += [ACCOUNTS, ROLES, ROLE_BINDINGS]
        # Only who has a right may give it to the job's pods.
        given = (Right("delete", PODS), Right("list", EVENTS))
        if spec.kind != "pytorchjob":
            given = (*given, Right("patch", PODS, "status"))
    return (
        *given,
        *(Right(verb, JOB_KINDS[spec.kind].resource) for verb in RUN),
        *(Right(verb, resource) for resource in made for verb in MAKE),
        *(Right(verb, PODS) for verb in GONE),
        Right("get", PODS, "log", "warns"),
        Right("create", PODS, "exec", "warns"),
        *(() if given else (Right("list", EVENTS, "", "warns"),)),
    )


def _rights(api: Asks, spec: KubernetesSpec, namespace: str) -> Iterator[Finding]:
    wanted = needed(spec)
    missing = [right for right in wanted if not _may(api, right, namespace)]
    if not missing:
        found = f"all {len(wanted)} that submitting, watching and cancelling takes in {namespace}"
        yield Finding(what="rights", verdict="ok", found=found)
    else:
        yield Finding(
            what="rights",
            verdict="stops" if any(one.without == "stops" for one in missing) else "warns",
            found=f"you may not {_listing(missing)} in {namespace}",
            fix=f"an administrator gives you a Role in {namespace} with rules: {_rules(missing)}",
        )
    wide = [right for right in (Right("list", NODES), Right("list", PODS)) if not _may(api, right)]
    if wide:
        words = " or ".join(f"list {right.word}" for right in wide)
        yield Finding(
            what="cluster rights",
            verdict="warns",
            found=f"you may not {words} of the whole cluster",
            fix="plan with --inventory FILE, or ask for"
            " kubectl create clusterrole ndctl-inventory --verb=list --resource=nodes,pods and a"
            " clusterrolebinding to it",
        )


def _may(api: Asks, right: Right, namespace: str | None = None) -> bool:
    about = {"verb": right.verb, "group": right.resource.group, "resource": right.resource.plural}
    about |= {"subresource": right.sub} if right.sub else {}
    about |= {"namespace": namespace} if namespace else {}
    said = api.create(
        {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": about},
        },
        namespace or "",
    )
    return bool(lookup(said, ("status", "allowed"), False))


def _listing(rights: Sequence[Right]) -> str:
    """As in `create/patch secrets, list events`."""
    verbs: dict[str, list[str]] = {}
    for right in rights:
        verbs.setdefault(right.word, []).append(right.verb)
    return ", ".join(f"{'/'.join(some)} {word}" for word, some in verbs.items())


def _rules(rights: Sequence[Right]) -> str:
    """As a Role takes them, in one line of YAML."""
    resources: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for right in dict.fromkeys(replace(one, verb="") for one in rights):
        verbs = tuple(one.verb for one in rights if replace(one, verb="") == right)
        name = right.resource.plural + (f"/{right.sub}" if right.sub else "")
        resources.setdefault((right.resource.group, verbs), []).append(name)
    rules = (
        f'{{apiGroups: ["{group}"], resources: [{", ".join(names)}], verbs: [{", ".join(verbs)}]}}'
        for (group, verbs), names in resources.items()
    )
    return f"[{', '.join(rules)}]"


def _named(api: Asks, spec: KubernetesSpec, namespace: str, hosts: int | None) -> Iterator[Finding]:
    """What the spec names has to be there."""
    if spec.service_account is not None:
        yield _there(
            api, ACCOUNTS, namespace, spec.service_account, "service account",
            "leave cluster.kubernetes.service_account out: then the job gets one of its own",
        )  # fmt: skip
    if hosts is None:
        return
    if spec.image is None:
        fix = "set cluster.kubernetes.image to an image with ndctl installed (manifests/image)"
        yield Finding(what="image", verdict="stops", found="none is set", fix=fix)
    for name in spec.image_pull_secrets:
        yield _there(
            api, SECRETS, namespace, name, "pull secret",
            f"kubectl -n {namespace} create secret docker-registry {name} …",
        )  # fmt: skip
    if spec.priority_class is not None:
        yield _there(
            api, PRIORITIES, None, spec.priority_class, "priority class",
            "`kubectl get priorityclass` lists those that there are",
        )  # fmt: skip
    for path, resource, name, key in references(spec):
        if lack := lacking(api, namespace, resource, name, key):
            fix = to_create(namespace, resource, name, key)
            yield Finding(what="environment", verdict="stops", found=f"{path}: {lack}", fix=fix)
    yield _runs(api, spec, namespace, hosts)


def _there(
    api: Asks, resource: Resource, namespace: str | None, name: str, what: str, fix: str
) -> Finding:
    try:
        item = api.get(resource, namespace, name)
    except Forbidden as exc:
        found = f"{name}; whether it exists may not be asked ({exc.message})"
        return Finding(what=what, verdict="note", found=found)
    if item is None:
        where = f" in {namespace}" if namespace else ""
        return Finding(what=what, verdict="stops", found=f"there is no {name}{where}", fix=fix)
    return Finding(what=what, verdict="ok", found=name)


def _runs(api: Asks, spec: KubernetesSpec, namespace: str, hosts: int) -> Finding:
    """The run directory, that all pods of a job read and write."""
    what, claim = "run volume", spec.runs.claim
    if claim is None:
        if spec.runs.host_path is not None:
            found = f"{spec.runs.host_path} of each node, which has to be the same everywhere"
            return Finding(what=what, verdict="note", found=found)
        fix = "set cluster.kubernetes.runs.claim (ReadWriteMany) or .host_path"
        return Finding(what=what, verdict="stops", found="none is set", fix=fix)
    there = _there(
        api, CLAIMS, namespace, claim, what,
        f"create a PersistentVolumeClaim {claim} with accessModes [{SHARED}], see manifests/",
    )  # fmt: skip
    if there.verdict != "ok":
        return there
    item = api.get(CLAIMS, namespace, claim) or {}
    modes = lookup(item, ("spec", "accessModes"), ())
    phase = lookup(item, ("status", "phase"), "Pending")
    found = f"{claim} is {phase}, {', '.join(modes)}"
    if SHARED not in modes and hosts > 1:
        fix = f"make it of a storage class of a shared file system, with accessModes [{SHARED}]"
        return Finding(what=what, verdict="stops", found=f"{found}; {hosts} hosts write", fix=fix)
    if phase == "Lost":
        fix = "its volume is gone: make another claim"
        return Finding(what=what, verdict="stops", found=found, fix=fix)
    return Finding(what=what, verdict="ok" if phase == "Bound" else "note", found=found)


def _devices(api: Asks, spec: KubernetesSpec) -> Finding:
    try:
        nodes = [parse_node(item) for item in api.list(NODES, None).items]
    except Forbidden as exc:
        return Finding(what="nodes", verdict="note", found=f"not known: {exc.message}")
    resource = spec.gpu_resource
    having = [node for node in nodes if resource is None or node.can_give(resource) > 0]
    tolerations = tolerations_of(spec)
    usable = [node for node in having if not node.is_virtual and shut(node, tolerations) is None]
    of = f" with {resource}" if resource else ""
    found = f"{len(usable)} of {len(having)}{of} take pods, of {len(nodes)} nodes"
    if usable:
        return Finding(what="nodes", verdict="ok", found=found)
    fix = "`ndctl inventory --backend kubernetes` says why of each"
    if not having:
        known = sorted({name for node in nodes for name in node.allocatable if "/" in name})
        fix = f"set cluster.kubernetes.gpu_resource to one of {', '.join(known)}, or to null"
        if not known:
            fix = "install the device plugin (the GPU operator), or set gpu_resource to null"
    return Finding(what="nodes", verdict="stops", found=found, fix=fix)


def _kueue(api: Asks, spec: KubernetesSpec, namespace: str) -> Iterator[Finding]:
    try:
        version = api.read(f"/apis/{KUEUE}")["preferredVersion"]["version"]
    except Missing:
        if spec.queue is not None:
            found = f"cluster.kubernetes.queue={spec.queue}, and there is no Kueue"
            fix = "set cluster.kubernetes.queue to null, or have Kueue installed"
            yield Finding(what="queue", verdict="stops", found=found, fix=fix)
        return
    if spec.queue is None:
        found = f"Kueue {version} is there; no cluster.kubernetes.queue is set"
        yield Finding(what="queue", verdict="note", found=found)
        return
    queues = Resource(KUEUE, version, "localqueues", "LocalQueue")
    yield _there(
        api, queues, namespace, spec.queue, "queue",
        f"`kubectl -n {namespace} get localqueues` lists those that there are",
    )  # fmt: skip
    levels = kueue_levels(api)
    said = ", ".join(levels) if levels else "none" if levels is not None else "may not be read"
    yield Finding(what="kueue topology", verdict="note", found=f"levels: {said}")
