"""What follows from what a controller sees. Pure: no clock, no requests, nothing kept.

It touches what carries ndctl's labels alone, and of a node nothing but its own taint. It does not
judge training: of a job whose pods run it knows nothing. `suspend` of a job in a queue is Kueue's:
such a job's pods are deleted instead, and Kueue sees to the rest.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from orchestrator.backends.kubernetes import fields, observe
from orchestrator.backends.kubernetes.controller.actions import Action, Delete, Patch, Ref
from orchestrator.backends.kubernetes.controller.placeholders import placeholders
from orchestrator.backends.kubernetes.controller.taints import taints
from orchestrator.backends.kubernetes.controller.wish import (
    GangRestart,
    annotations_of,
    excluding,
    requeues_of,
    wish_of,
)
from orchestrator.backends.kubernetes.exclusion import without
from orchestrator.backends.kubernetes.render import names
from orchestrator.backends.kubernetes.render.patch import merged
from orchestrator.backends.kubernetes.resources import (
    CONFIG_MAPS,
    JOB_KINDS,
    PODS,
    SECRETS,
    Object,
    lookup,
    name_of,
    nested,
)
from orchestrator.backends.kubernetes.tracked import failed, is_held
from orchestrator.cluster.kubernetes.nodes import READY, parse_node
from orchestrator.contract.kubernetes import Kind, KubernetesSpec

FORCE_S = KubernetesSpec().force_delete_after
LATE_S = 60.0
"""For the operator, and the pods themselves, to be done with a job that has ended."""
ORPHAN_S = 600.0
"""For the job to come that a ConfigMap was made for: who applies a text makes the job last."""
Place = tuple[str, str]
"""Namespace and name of a job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """Which controller it is."""

    home: str
    """Where its Lease is."""
    namespace: str | None = None
    """That it looks after; None: all."""
    taint: bool = False
    """Nodes that a job leaves out are kept from others as well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """All objects of a scope."""

    jobs: Mapping[Kind, Sequence[Object]] = field(default_factory=dict)
    pods: Sequence[Object] = ()
    nodes: Sequence[Object] = ()
    config_maps: Sequence[Object] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    chains: tuple[tuple[Action, ...], ...]
    """Each order of one only when the one before went through."""
    since: Mapping[str, float]
    """What has to last before anything is done about it -> when it was first seen; to be given to
    the next decision. By the clock of who looks: others' may be wrong."""
    due_s: float | None = None
    """When to decide again though nothing changes."""
    busy: bool = False
    """Something was begun and is not at its end."""


@dataclass(slots=True)
class Timers:
    before: Mapping[str, float]
    now: float
    after: dict[str, float] = field(default_factory=dict)
    due_s: float | None = None

    def over(self, what: str, limit_s: float) -> bool:
        """Whether it has lasted so long."""
        self.after[what] = self.before.get(what, self.now)
        left = self.after[what] + limit_s - self.now
        if left > 0:
            self.due_s = left if self.due_s is None else min(left, self.due_s)
        return left <= 0


def decide(seen: Seen, scope: Scope, since: Mapping[str, float], now: float) -> Decision:
    """`since` is of the decision before, `now` monotonic."""
    timers = Timers(since, now)
    pods = _by_job(seen.pods)
    every = [(kind, job) for kind, jobs in seen.jobs.items() for job in jobs]
    ours = [(kind, job) for kind, job in every if is_ours(job) and not _is_made_or_gone(job)]
    anothers = {_place(job) for _, job in ours if _is_anothers(job, scope)}
    ours = [(kind, job) for kind, job in ours if _place(job) not in anothers]
    begun = [_restart(kind, job, pods.get(_place(job), ()), scope) for kind, job in ours]
    chains: list[tuple[Action, ...]] = [*filter(None, begun)]
    # Before anything else: where pods are to go there are still some to make placeholders of.
    chains[:0] = [(one,) for one in placeholders(ours, seen.pods, seen.nodes)]
    mine = [pod for pod in seen.pods if is_ours(pod) and _job_of(pod) not in anothers]
    chains += [(one,) for one in _lost(mine, seen.nodes, timers)]
    chains += [(one,) for one in _late([job for _, job in ours], pods, timers)]
    chains += _orphans(seen.config_maps, {_place(job) for _, job in every}, timers)
    if scope.taint:
        chains += [(one,) for one in taints(seen.nodes, [job for _, job in ours], scope.namespace)]
    return Decision(
        chains=tuple(chains),
        since=timers.after,
        due_s=timers.due_s,
        busy=timers.due_s is not None or any(_is_restarting(job) for _, job in ours),
    )


def is_ours(item: Object) -> bool:
    labels: Mapping[str, str] = lookup(item, ("metadata", "labels"), {})
    return labels.get(names.MANAGED_LABEL) == "ndctl" and bool(labels.get(names.JOB_LABEL))


def _is_made_or_gone(job: Object) -> bool:
    """Made by an operator of a job of another kind, or on its way out."""
    return bool(lookup(job, ("metadata", "ownerReferences"))) or fields.is_leaving(job)


def _is_anothers(job: Object, scope: Scope) -> bool:
    return annotations_of(job).get(names.CONTROLLER_ANNOTATION, scope.home) != scope.home


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


# A gang restart


def _is_restarting(job: Object) -> bool:
    notes = annotations_of(job)
    asked = names.GANG_ANNOTATION in notes or names.SUSPENDED_ANNOTATION in notes
    return asked and not _is_over(job)


def _is_over(job: Object) -> bool:
    return observe.has_ended(job) or names.CANCELLED_ANNOTATION in annotations_of(job)


def _restart(
    kind: Kind, job: Object, pods: Sequence[Object], scope: Scope
) -> tuple[Action, ...] | None:
    """One step at a time; each is seen in the object before the next."""
    notes, wish = annotations_of(job), wish_of(job)
    suspended = lookup(job, JOB_KINDS[kind].suspend) is True
    by_us = names.SUSPENDED_ANNOTATION in notes
    there = [pod for pod in pods if fields.alive([pod]) or fields.is_leaving(pod)]
    if _is_over(job):
        if wish is None and not by_us:
            return None
        return (_settle(kind, job, wish=None, reason="the job is over"),)
    if names.CONTROLLER_ANNOTATION not in notes:
        return (_look_after(kind, job, scope),)
    if wish is None and not by_us:
        return None
    wish = wish or GangRestart()
    if lookup(job, ("metadata", "labels", names.QUEUE_LABEL)):
        return _give_back(kind, job, there, wish)
    if not suspended:
        if by_us:
            return (_settle(kind, job, wish=wish, reason="it was resumed by somebody else"),)
        return (_suspend(kind, job, wish, scope),)
    if there:
        return None
    if by_us:
        return (_resume(kind, job, wish),)
    return (_settle(kind, job, wish=wish, reason="it is suspended by somebody else, without pods"),)


def _look_after(kind: Kind, job: Object, scope: Scope) -> Patch:
    what = Ref.of(JOB_KINDS[kind].resource, job)
    return Patch(
        what=what,
        change={"metadata": {"annotations": {names.CONTROLLER_ANNOTATION: scope.home}}},
        does=f"look after {what}",
        reason="it is a job of ndctl",
    )


def _suspend(kind: Kind, job: Object, wish: GangRestart, scope: Scope) -> Patch:
    what = Ref.of(JOB_KINDS[kind].resource, job)
    note = {"metadata": {"annotations": {names.SUSPENDED_ANNOTATION: f"{scope.home}/controller"}}}
    return Patch(
        what=what,
        change={**nested(JOB_KINDS[kind].suspend, True), **note},
        does=f"suspend {what}",
        reason=f"{wish.by} asks for new pods in place of all{_but(wish)}",
    )


def _but(wish: GangRestart) -> str:
    return f", not on {', '.join(wish.exclude)}" if wish.exclude else ""


def _resume(kind: Kind, job: Object, wish: GangRestart) -> Patch:
    what, change = Ref.of(JOB_KINDS[kind].resource, job), _settled(kind, job, wish)
    change["spec"] = merged(change.get("spec", {}), nested(JOB_KINDS[kind].suspend, False)["spec"])
    reason = f"no pod is left; restart {requeues_of(job) + 1}{_but(wish)}"
    return Patch(what=what, change=change, does=f"resume {what}", reason=reason)


def _settle(kind: Kind, job: Object, *, wish: GangRestart | None, reason: str) -> Patch:
    """Without `suspend`: that is somebody else's now."""
    what = Ref.of(JOB_KINDS[kind].resource, job)
    return Patch(
        what=what,
        change=_settled(kind, job, wish),
        does=f"take the gang restart of {what} for done",
        reason=reason,
    )


def _settled(kind: Kind, job: Object, wish: GangRestart | None) -> dict[str, Any]:
    """`wish` None: it is forgotten."""
    notes: dict[str, Any] = {names.GANG_ANNOTATION: None, names.SUSPENDED_ANNOTATION: None}
    if wish is None:
        return {"metadata": {"annotations": notes}}
    notes |= {names.REQUEUES_ANNOTATION: str(requeues_of(job) + 1), **excluding(job, wish.exclude)}
    return {**without(kind, job, wish.exclude), "metadata": {"annotations": notes}}


def _give_back(
    kind: Kind, job: Object, there: Sequence[Object], wish: GangRestart
) -> tuple[Action, ...]:
    """Of a job in a queue. Should the deletes be lost with their controller, then the pods leave by
    themselves: their leader has asked."""
    reason = f"{wish.by} asks for new pods in place of all{_but(wish)}, and `suspend` is Kueue's"
    staying = [pod for pod in there if not fields.is_leaving(pod)]
    return (
        _settle(kind, job, wish=wish, reason=reason),
        *(Delete(what=Ref.of(PODS, pod), reason=reason) for pod in staying),
    )


# Pods that stay though they should not


def _lost(pods: Iterable[Object], nodes: Iterable[Object], timers: Timers) -> Iterator[Delete]:
    """A node that does not answer never says that its pod is gone."""
    parsed = {node.name: node for node in map(parse_node, nodes)}
    for pod in pods:
        host = fields.node_of(pod)
        if not (host and fields.is_leaving(pod)):
            continue
        node = parsed.get(host)
        if node is not None and node.ready == READY:
            continue
        limit_s = _force_after(pod)
        if timers.over(f"lost {pod['metadata']['uid']}", limit_s):
            said = "is no node any more" if node is None else f"does not answer ({node.why})"
            why = f"{host} {said}, and the pod was to go {limit_s:g} s ago"
            status = failed(pod) if is_held(pod) else None
            yield Delete(what=Ref.of(PODS, pod), reason=why, grace_s=0, status=status)


def _force_after(pod: Object) -> float:
    try:
        return max(0.0, float(annotations_of(pod)[names.FORCE_ANNOTATION]))
    except (KeyError, ValueError):
        return FORCE_S


def _late(
    jobs: Iterable[Object], pods: Mapping[Place, Sequence[Object]], timers: Timers
) -> Iterator[Delete]:
    """Pods that hold devices of a job that has ended."""
    for job in jobs:
        if not observe.has_ended(job):
            continue
        for pod in fields.alive(pods.get(_place(job), ())):
            if fields.is_leaving(pod):
                continue
            if timers.over(f"late {pod['metadata']['uid']}", LATE_S):
                why = f"its job has ended, and it still holds its devices {LATE_S:g} s later"
                yield Delete(what=Ref.of(PODS, pod), reason=why)


def _orphans(
    config_maps: Iterable[Object], jobs: set[Place], timers: Timers
) -> Iterator[tuple[Action, ...]]:
    """What was made beside a job that never came, or that was deleted before it owned it."""
    for item in config_maps:
        namespace, job = _job_of(item)
        if not is_ours(item) or name_of(item) != names.config_map_of(job):
            continue
        if lookup(item, ("metadata", "ownerReferences")) or (namespace, job) in jobs:
            continue
        if timers.over(f"orphan {item['metadata']['uid']}", ORPHAN_S):
            what = Ref.of(CONFIG_MAPS, item)
            why = f"nobody owns it, and there has been no job {job} for {ORPHAN_S:g} s"
            # By its name: Secrets are not the controller's to read.
            called = names.secret_of(job)
            secret = Ref(resource=SECRETS, namespace=namespace, name=called, uid="", version="")
            yield Delete(what=what, reason=why), Delete(what=secret, reason=why)
