"""The pod that is to lead, when nobody hears it: another one in its place.

An operator makes a pod anew once it is gone. Yet a node that is dead keeps its pods, and a kubelet
that cannot begin one (it cannot pull the image, or mount a volume) tries for ever. Such a pod is
taken elsewhere, a few times: where it begins nowhere it is no node's fault.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from orchestrator.backends.kubernetes.api.api_errors import Forbidden
from orchestrator.backends.kubernetes.api.client import Api
from orchestrator.backends.kubernetes.controller import asking
from orchestrator.backends.kubernetes.observe.object_fields import (
    LABEL,
    alive,
    begun_at,
    has_begun,
    is_leaving,
    launch_of,
    leads,
    node_of,
    scheduled_at,
)
from orchestrator.backends.kubernetes.observe.pending_reasons import pod_trouble
from orchestrator.backends.kubernetes.pod_deletion import end_pod, node_answers
from orchestrator.backends.kubernetes.render import names
from orchestrator.backends.kubernetes.resources import (
    JOB_KINDS,
    PODS,
    Object,
    name_of,
)
from orchestrator.backends.kubernetes.status_cache import events_of
from orchestrator.contract.launch import LaunchPlan
from orchestrator.contract.spec.kubernetes_spec import KubernetesSpec
from orchestrator.errors import BackendError
from orchestrator.seams import Clock

log = logging.getLogger(__name__)

BEGIN_S = 120.0
"""For the pod to begin on its node; at most half of `pod_patience`, after which nobody waits."""
YOUNG_S = 300.0
"""For one that runs to be heard: it may have to wait for its predecessor's lock."""
MOST = 3
"""Nodes that it is taken away from, in one launch."""
CLOCKS_S = 3.0
"""By which times of the API server and the nodes, in whole seconds, may be off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fate:
    """What is to become of the pod that is to lead."""

    pod: Object
    does: Literal["wait", "end", "move", "move-if-silent"]
    """Wait for it; end it; the same, and the next one comes elsewhere; that where its node does
    not answer."""
    why: str


def fate_of(
    pods: Sequence[Object],
    events: Sequence[Object],
    now: float,
    *,
    silent_s: float | None,
    patience_s: float,
) -> Fate | None:
    """None: there is no such pod, and it is the operator's to make one."""
    pod = next((one for one in alive(pods) if leads(one)), None)
    if pod is None:
        return None
    host = node_of(pod)
    if not host:
        trouble = pod_trouble(pod, events)
        return Fate(pod=pod, does="wait", why=str(trouble or "it has no node yet"))
    if is_leaving(pod):
        return Fate(pod=pod, does="end", why=f"it is to go, and is on {host} still")
    if has_begun(pod):
        return _of_one_that_runs(pod, now - begun_at(pod), silent_s)
    waited_s = now - scheduled_at(pod)
    if waited_s < min(BEGIN_S, patience_s / 2):
        return Fate(pod=pod, does="wait", why=f"it came to {host} {waited_s:.0f} s ago")
    trouble = pod_trouble(pod, events)
    if trouble is None:  # an image may be large
        return Fate(pod=pod, does="move-if-silent", why=f"{host} does not answer")
    why = f"it has not begun on {host} for {waited_s:.0f} s, {trouble.what}: {trouble.why}"
    return Fate(pod=pod, does="move", why=why)


def _of_one_that_runs(pod: Object, age_s: float, silent_s: float | None) -> Fate:
    if silent_s is None or age_s < min(silent_s + CLOCKS_S, YOUNG_S):
        return Fate(pod=pod, does="wait", why=f"it began {age_s:.0f} s ago: it may yet be heard")
    return Fate(pod=pod, does="end", why=f"its agent has not been heard for {silent_s:.0f} s")


def revive(
    api: Api,
    clock: Clock,
    namespace: str,
    launch: LaunchPlan,
    exclude: Callable[[Sequence[str]], None],
    *,
    silent_s: float | None,
) -> None:
    """Raises BackendError where it may not, or where nothing more can be done about it here."""
    spec = launch.kubernetes or KubernetesSpec()
    pods = api.list(PODS, namespace, labels=f"{LABEL}={launch.job}").items
    events, unseen = events_of(api, namespace)
    if unseen:
        log.warning("why the leader's pod does not begin may not be known: %s", unseen)
    patience_s = spec.pod_patience
    fate = fate_of(pods, events, clock.now(), silent_s=silent_s, patience_s=patience_s)
    if fate is None:
        log.info("the operator has not made the leader's pod yet")
        return
    pod, host = fate.pod, node_of(fate.pod)
    if fate.does == "move-if-silent" and node_answers(api, host) is not False:
        fate = replace(fate, does="wait", why=f"it is being made on {host}")
    if fate.does == "wait":
        log.info("the leader's pod %s is waited for: %s", name_of(pod), fate.why)
        return
    log.warning("the leader's pod %s is made anew: %s", name_of(pod), fate.why)
    if fate.does != "end":
        if not _noted(api, namespace, launch, fate):
            return
        exclude([host])
    end_pod(api, clock, spec.kind, host, pod, spec.force_delete_after)


def _noted(api: Api, namespace: str, launch: LaunchPlan, fate: Fate) -> bool:
    """Written down that the pod is taken away, before it is. False: look at it again later."""
    kind = JOB_KINDS[(launch.kubernetes or KubernetesSpec()).kind]
    job = api.get(kind.resource, namespace, launch.job)
    if job is None or launch_of(job) != launch.launch:
        log.info("%s is another job by now: its pod stays as it is", launch.job)
        return False
    name, host = name_of(fate.pod), node_of(fate.pod)
    way = (
        f"`kubectl -n {namespace} describe pod {name}` shows why; to have it elsewhere:"
        f" `kubectl cordon {host}` and `kubectl -n {namespace} delete pod {name}`"
    )

    def change(notes: Mapping[str, str]) -> Mapping[str, str]:
        before = moved_from(notes)
        if len(before) >= MOST:
            where = ", ".join(before)
            words = f"{fate.why}; it was taken away from {where}, and is left alone now"
            raise BackendError(f"the leader's pod {name} does not begin: {words}", fix=way)
        return {names.NEVER_BEGAN_ANNOTATION: ",".join((*before, host))}

    try:
        return asking.note(api, namespace, launch.job, change, tries=1)
    except Forbidden as exc:
        words = f"{fate.why}; and it may not be written down that it was taken off {host}"
        fix = f"{way}\n  or {exc.fix}"
        raise BackendError(
            f"the leader's pod {name} does not begin: {words}: {exc.message}", fix=fix
        ) from exc


def moved_from(notes: Mapping[str, str]) -> tuple[str, ...]:
    """Nodes that the pod was taken away from, one as often as that was done."""
    return tuple(filter(None, notes.get(names.NEVER_BEGAN_ANNOTATION, "").split(",")))
