"""The controller's decisions from what it observes. Pure: no clock, no requests, no state.

It changes only objects with ndctl's labels, and of a node only its own taint. It does not know
whether training makes progress. Kueue owns `suspend` of a queued job: there the controller deletes
the pods instead, and Kueue creates new ones.

Only the controller may change a job. It changes `suspend`, node affinity and its own annotations,
when the pods of that job request it (`pod_requests.py`).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct, field

from orchestrator.backends.kubernetes.controller.actions import Action, Delete, Patch, Ref
from orchestrator.backends.kubernetes.controller.placeholders import placeholders
from orchestrator.backends.kubernetes.controller.pod_requests import (
    MOST_NODES,
    PodRequests,
    excluded_of,
    number_in,
    requests_of,
)
from orchestrator.backends.kubernetes.controller.state_notes import state_notes
from orchestrator.backends.kubernetes.controller.taints import taints
from orchestrator.backends.kubernetes.finalizers import failed, is_held
from orchestrator.backends.kubernetes.node_affinity import without
from orchestrator.backends.kubernetes.observe import object_fields, observe
from orchestrator.backends.kubernetes.render import names
from orchestrator.backends.kubernetes.render.patch import merged
from orchestrator.backends.kubernetes.resources import (
    ACCOUNTS,
    CONFIG_MAPS,
    JOB_KINDS,
    PODS,
    POLICIES,
    ROLE_BINDINGS,
    ROLES,
    RUNTIMES,
    Object,
    Resource,
    lookup,
    name_of,
    nested,
)
from orchestrator.contract.spec.kubernetes_spec import Kind, KubernetesSpec
from orchestrator.inventory.kubernetes.nodes import READY, parse_node

FORCE_S = KubernetesSpec().force_delete_after
LATE_S = 60.0
"""Time for the operator and the pods to finish after a job has ended."""
ORPHAN_S = 600.0
"""Time for the job of an object to be created: `kubectl apply` creates the job last."""
BESIDE: Mapping[Resource, Sequence[Callable[[str], str]]] = {
    CONFIG_MAPS: (names.config_map_of, names.state_map_of),
    ACCOUNTS: (names.account_of,),
    ROLES: (names.account_of,),
    ROLE_BINDINGS: (names.account_of,),
    POLICIES: (names.account_of,),
    RUNTIMES: (lambda job: job,),
}
"""Kinds of objects that are created with a job, and their names. The Secret is not listed, because
the ConfigMap owns it, so Kubernetes deletes both together."""
Place = tuple[str, str]
"""Namespace and name of a job."""


class Scope(Struct, frozen=True, kw_only=True):
    """The controller's own identity."""

    home: str
    """The namespace of its Lease."""
    namespace: str | None = None
    """Namespaces that it manages; None: all."""
    taint: bool = False
    """Also taint nodes that a job excludes, so that other pods avoid them."""


class Seen(Struct, frozen=True, kw_only=True):
    """All objects of a scope."""

    jobs: Mapping[Kind, Sequence[Object]] = field(default_factory=dict)
    pods: Sequence[Object] = ()
    nodes: Sequence[Object] = ()
    beside: Mapping[Resource, Sequence[Object]] = field(default_factory=dict)
    """Objects of each kind in `BESIDE`."""


class Decision(Struct, frozen=True, kw_only=True):
    chains: tuple[tuple[Action, ...], ...]
    """Actions of a chain run in order; each needs the previous one to succeed."""
    since: Mapping[str, float]
    """Conditions that must last before the controller acts -> when each was first seen, by the
    controller's own clock. It is an input of the next decision."""
    due_s: float | None = None
    """When to decide again if nothing changes."""
    busy: bool = False
    """Something has started and is not finished."""
    refused: tuple[str, ...] = ()
    """Rejected requests of pods, with job and reason."""


class Timers(Struct):
    before: Mapping[str, float]
    now: float
    after: dict[str, float] = field(default_factory=dict)
    due_s: float | None = None

    def over(self, what: str, limit_s: float) -> bool:
        """Whether the condition has lasted this long."""
        self.after[what] = self.before.get(what, self.now)
        left = self.after[what] + limit_s - self.now
        # The loop sleeps until the first of these times, because no watch event marks it.
        if left > 0:
            self.due_s = left if self.due_s is None else min(left, self.due_s)
        return left <= 0


def decide(seen: Seen, scope: Scope, since: Mapping[str, float], now: float) -> Decision:
    """`since` is that of the previous decision; `now` is monotonic."""
    timers = Timers(since, now)
    pods = _by_job(seen.pods)
    every = [(kind, job) for kind, jobs in seen.jobs.items() for job in jobs]
    ours = [(kind, job) for kind, job in every if is_ours(job) and not _is_made_or_gone(job)]
    # Two controllers may watch the same namespaces. A job belongs to the one whose name is noted on
    # it, so that they do not undo each other's changes.
    anothers = {_place(job) for _, job in ours if _is_anothers(job, scope)}
    ours = [(kind, job) for kind, job in ours if _place(job) not in anothers]
    asked = [(kind, job, _asked(kind, job, seen)) for kind, job in ours]
    # Before pods are deleted, because placeholders copy a pod of the job.
    chains: list[tuple[Action, ...]] = [(one,) for one in placeholders(ours, seen.pods, seen.nodes)]
    for kind, job, pod_requests in asked:
        there = pods.get(_place(job), ())
        chains += filter(None, [_served(kind, job, there, pod_requests, scope)])
        chains += [(one,) for one in _ended(pod_requests, there)]
    # These pods may belong to a job that is deleted already, so they are not looked up by job.
    mine = [pod for pod in seen.pods if is_ours(pod) and _job_of(pod) not in anothers]
    chains += [(one,) for one in _lost(mine, seen.nodes, timers)]
    chains += [(one,) for one in _late([job for _, job in ours], pods, timers)]
    # Every job counts here, also one of another controller: its helper objects are not orphans.
    places = {_place(job) for _, job in every}
    for resource, items in seen.beside.items():
        chains += [(one,) for one in _orphans(resource, items, places, timers)]
    changed = {action.what for chain in chains for action in chain}
    noted = state_notes(ours, seen.beside.get(CONFIG_MAPS, ()))
    chains += [
        (one,) for one in noted if one.what not in changed
    ]  # one change at a time, so that each starts from the object's new version
    if scope.taint:
        chains += [(one,) for one in taints(seen.nodes, [job for _, job in ours], scope.namespace)]
    return Decision(
        chains=tuple(chains),
        since=timers.after,
        due_s=timers.due_s,
        busy=timers.due_s is not None
        or any(_is_busy(job, pod_requests) for _, job, pod_requests in asked),
        refused=tuple(
            _said(job, why) for _, job, pod_requests in asked for why in _refused(job, pod_requests)
        ),
    )


def _asked(kind: Kind, job: Object, seen: Seen) -> PodRequests:
    """The requests of the pods of `job`, from the only ConfigMap that they may write."""
    namespace, name = _place(job)
    wanted = (namespace, names.config_map_of(name))
    found = (one for one in seen.beside.get(CONFIG_MAPS, ()) if _place(one) == wanted)
    return requests_of(kind, job, next(found, None))


def _refused(job: Object, pod_requests: PodRequests) -> Iterator[str]:
    yield from pod_requests.refused
    if too_many := _to_keep_off(job, pod_requests)[1]:
        yield (
            f"{names.AVOID_ANNOTATION}: {', '.join(too_many)}; a job may avoid {MOST_NODES} at most"
        )


def _said(job: Object, why: str) -> str:
    namespace, name = _place(job)
    return f"pods of job {namespace}/{name} have an invalid request: {why}"


def is_ours(item: Object) -> bool:
    labels: Mapping[str, str] = lookup(item, ("metadata", "labels"), {})
    return labels.get(names.MANAGED_LABEL) == "ndctl" and bool(labels.get(names.JOB_LABEL))


def _is_made_or_gone(job: Object) -> bool:
    """Created for a job of another kind, or being deleted."""
    return bool(lookup(job, ("metadata", "ownerReferences"))) or object_fields.is_leaving(job)


def _is_anothers(job: Object, scope: Scope) -> bool:
    return (
        object_fields.annotations_of(job).get(names.CONTROLLER_ANNOTATION, scope.home) != scope.home
    )


def _place(item: Object) -> Place:
    return str(lookup(item, ("metadata", "namespace"), "")), name_of(item)


def _job_of(item: Object) -> Place:
    label = lookup(item, ("metadata", "labels", names.JOB_LABEL), "")
    return str(lookup(item, ("metadata", "namespace"), "")), str(label)


def _by_job(pods: Iterable[Object]) -> dict[Place, list[Object]]:
    found: dict[Place, list[Object]] = {}
    for pod in pods:
        if is_ours(pod):
            found.setdefault(_job_of(pod), []).append(pod)
    return found


# Requests of pods


def _is_busy(job: Object, pod_requests: PodRequests) -> bool:
    asked = (
        pod_requests.restart is not None
        or names.SUSPENDED_ANNOTATION in object_fields.annotations_of(job)
    )
    return asked and not _is_over(job)


def _is_over(job: Object) -> bool:
    return observe.has_ended(job) or names.CANCELLED_ANNOTATION in object_fields.annotations_of(job)


def _served(
    kind: Kind, job: Object, pods: Sequence[Object], pod_requests: PodRequests, scope: Scope
) -> tuple[Action, ...] | None:
    """The next change of `job`. One at a time: the object must show it before the next."""
    notes = object_fields.annotations_of(job)
    if _is_over(job):
        # The requests of an ended job no longer matter, and it need not be resumed.
        return (_forget(kind, job),) if names.SUSPENDED_ANNOTATION in notes else None
    # The job's pods send requests only after they find the controller's name here.
    if names.CONTROLLER_ANNOTATION not in notes:
        return (_look_after(kind, job, scope),)
    # Exclude nodes before a restart, because new pods must not start on them.
    if missing := _to_keep_off(job, pod_requests)[0]:
        return (_keep_off(kind, job, missing),)
    return _restart(kind, job, pods, pod_requests, scope)


def _to_keep_off(job: Object, pod_requests: PodRequests) -> tuple[list[str], list[str]]:
    """Further nodes to exclude, and requested nodes above the limit. Without a limit a job could
    exclude all nodes of the cluster, one after the other."""
    before = {*excluded_of(job)}
    missing = sorted(pod_requests.nodes - before)
    room = max(0, MOST_NODES - len(before))
    return missing[:room], missing[room:]


def _keep_off(kind: Kind, job: Object, hosts: Sequence[str]) -> Patch:
    what = Ref.of(JOB_KINDS[kind].resource, job)
    every = ",".join(sorted({*excluded_of(job), *hosts}))
    note = {"metadata": {"annotations": {names.EXCLUDED_ANNOTATION: every}}}
    return Patch(
        what=what,
        change={**without(kind, job, hosts), **note},
        does=f"keep new pods of {what} off {', '.join(hosts)}",
        reason="its pods requested it",
    )


def _ended(pod_requests: PodRequests, pods: Sequence[Object]) -> Iterator[Delete]:
    """Only pods of this job: matched by label, name and uid."""
    wanted = {*pod_requests.end}
    for pod in pods:
        # A uid and not the name alone: an operator gives the successor the same name, and the
        # request must not delete it too.
        if (name_of(pod), pod["metadata"]["uid"]) in wanted and not object_fields.is_leaving(pod):
            why = "its job requested a replacement"
            yield Delete(what=Ref.of(PODS, pod), reason=why)


def _restart(
    kind: Kind, job: Object, pods: Sequence[Object], pod_requests: PodRequests, scope: Scope
) -> tuple[Action, ...] | None:
    notes = object_fields.annotations_of(job)
    suspended = lookup(job, JOB_KINDS[kind].suspend) is True
    by_us = names.SUSPENDED_ANNOTATION in notes
    # A pod that is being deleted still holds its devices, so it counts until it is gone.
    there = [pod for pod in pods if object_fields.alive([pod]) or object_fields.is_leaving(pod)]
    # The annotation may be there without a request: the leader withdrew it, or its ConfigMap was
    # deleted. The job must still be resumed.
    if pod_requests.restart is None and not by_us:
        return None
    if lookup(job, ("metadata", "labels", names.QUEUE_LABEL)):
        return _restart_queued(kind, job, there, pod_requests)
    # The steps of a gang restart: suspend, wait until no pod is left, resume. Each round does one
    # of them, so a new controller continues where the former one stopped.
    if not suspended:
        if by_us:
            return (_settle(kind, job, pod_requests, reason="it was resumed by someone else"),)
        return (_suspend(kind, job, pod_requests, scope),)
    # If the job were resumed now, new pods could not get the devices of the old ones.
    if there:
        return None
    # The annotation shows that the controller suspended the job. A person who suspended it wants it
    # to stay so.
    if by_us:
        return (_resume(kind, job, pod_requests),)
    words = "it was suspended by someone else and has no pods"
    return (_settle(kind, job, pod_requests, reason=words),)


def _look_after(kind: Kind, job: Object, scope: Scope) -> Patch:
    what = Ref.of(JOB_KINDS[kind].resource, job)
    return Patch(
        what=what,
        change={"metadata": {"annotations": {names.CONTROLLER_ANNOTATION: scope.home}}},
        does=f"manage {what}",
        reason="it is a job of ndctl",
    )


def _suspend(kind: Kind, job: Object, pod_requests: PodRequests, scope: Scope) -> Patch:
    what = Ref.of(JOB_KINDS[kind].resource, job)
    note = {"metadata": {"annotations": {names.SUSPENDED_ANNOTATION: f"{scope.home}/controller"}}}
    return Patch(
        what=what,
        change={**nested(JOB_KINDS[kind].suspend, True), **note},
        does=f"suspend {what}",
        reason=_why(pod_requests),
    )


def _why(pod_requests: PodRequests) -> str:
    if pod_requests.restart is None:
        return "new pods in place of all were requested"
    but = (
        f", not on {', '.join(pod_requests.restart.exclude)}"
        if pod_requests.restart.exclude
        else ""
    )
    return f"{pod_requests.restart.by} requests new pods in place of all{but}"


def _resume(kind: Kind, job: Object, pod_requests: PodRequests) -> Patch:
    what, change = Ref.of(JOB_KINDS[kind].resource, job), _settled(job, pod_requests)
    change["spec"] = merged(change.get("spec", {}), nested(JOB_KINDS[kind].suspend, False)["spec"])
    # In the same patch as `suspend`: a count that is written separately could be lost with the
    # controller.
    number = number_in(job, names.RESTARTS_ANNOTATION) + 1
    reason = f"no pod is left; restart {number}"
    return Patch(what=what, change=change, does=f"resume {what}", reason=reason)


def _settle(kind: Kind, job: Object, pod_requests: PodRequests, *, reason: str) -> Patch:
    """Leaves `suspend` unchanged: someone else controls it now."""
    what = Ref.of(JOB_KINDS[kind].resource, job)
    return Patch(
        what=what,
        change=_settled(job, pod_requests),
        does=f"complete the gang restart of {what}",
        reason=reason,
    )


def _settled(job: Object, pod_requests: PodRequests) -> dict[str, Any]:
    """The controller may not remove the request from the ConfigMap, so it notes the digest of the
    finished request on the job."""
    number = str(number_in(job, names.RESTARTS_ANNOTATION) + 1)
    notes: dict[str, Any] = {
        names.SUSPENDED_ANNOTATION: None,
        names.RESTARTS_ANNOTATION: number,
        **({names.RESTARTED_ANNOTATION: pod_requests.digest} if pod_requests.digest else {}),
    }
    return {"metadata": {"annotations": notes}}


def _forget(kind: Kind, job: Object) -> Patch:
    what = Ref.of(JOB_KINDS[kind].resource, job)
    return Patch(
        what=what,
        change={"metadata": {"annotations": {names.SUSPENDED_ANNOTATION: None}}},
        does=f"release {what}",
        reason="the job has ended",
    )


def _restart_queued(
    kind: Kind, job: Object, there: Sequence[Object], pod_requests: PodRequests
) -> tuple[Action, ...]:
    """The gang restart of a queued job. If the controller dies before the deletes, the pods exit by
    themselves, because their leader requested the restart."""
    reason = f"{_why(pod_requests)}, and `suspend` is Kueue's"
    staying = [pod for pod in there if not object_fields.is_leaving(pod)]
    return (
        # Settle first. If the deletes came first and the controller died, its successor would
        # delete the new pods as well.
        _settle(kind, job, pod_requests, reason=reason),
        *(Delete(what=Ref.of(PODS, pod), reason=reason) for pod in staying),
    )


# Pods that remain although they should be deleted


def _lost(pods: Iterable[Object], nodes: Iterable[Object], timers: Timers) -> Iterator[Delete]:
    """An unreachable node never reports that its pod ended, so force the deletion."""
    parsed = {node.name: node for node in map(parse_node, nodes)}
    for pod in pods:
        host = object_fields.node_of(pod)
        if not (host and object_fields.is_leaving(pod)):
            continue
        node = parsed.get(host)
        # A reachable node ends the pod itself. By force, Kubernetes would forget a process that
        # still runs.
        if node is not None and node.ready == READY:
            continue
        limit_s = _force_after(pod)
        if timers.over(f"lost {pod['metadata']['uid']}", limit_s):
            said = "was deleted" if node is None else f"is unreachable ({node.why})"
            why = f"{host} {said}, and the pod's deletion is {limit_s:g} s overdue"
            # See `finalizers`: without this the pod of a Job stays even after a deletion by force.
            status = failed(pod) if is_held(pod) else None
            yield Delete(what=Ref.of(PODS, pod), reason=why, grace_s=0, status=status)


def _force_after(pod: Object) -> float:
    try:
        return max(0.0, float(object_fields.annotations_of(pod)[names.FORCE_ANNOTATION]))
    except (KeyError, ValueError):
        return FORCE_S


def _late(
    jobs: Iterable[Object], pods: Mapping[Place, Sequence[Object]], timers: Timers
) -> Iterator[Delete]:
    """Pods of an ended job that still hold devices."""
    for job in jobs:
        if not observe.has_ended(job):
            continue
        for pod in object_fields.alive(pods.get(_place(job), ())):
            if object_fields.is_leaving(pod):
                continue
            if timers.over(f"late {pod['metadata']['uid']}", LATE_S):
                why = f"its job has ended, but it still holds its devices {LATE_S:g} s later"
                yield Delete(what=Ref.of(PODS, pod), reason=why)


def _orphans(
    resource: Resource, items: Iterable[Object], jobs: set[Place], timers: Timers
) -> Iterator[Delete]:
    """Objects of a job that was never created or that was deleted without them. Kubernetes itself
    deletes objects with an owner."""
    for item in items:
        namespace, job = _job_of(item)
        # The labels alone are not enough: a person may have copied them to an object of another
        # name.
        if not is_ours(item) or name_of(item) not in {of(job) for of in BESIDE[resource]}:
            continue
        if lookup(item, ("metadata", "ownerReferences")) or (namespace, job) in jobs:
            continue
        if timers.over(f"orphan {item['metadata']['uid']}", ORPHAN_S):
            why = f"it has no owner, and job {job} has not existed for {ORPHAN_S:g} s"
            yield Delete(what=Ref.of(resource, item), reason=why)
