"""Replaces the leader's pod when no agent can reach the leader.

An operator recreates a pod only when it is deleted. But a dead node keeps its pods, and a kubelet
that cannot start a pod (image pull or mount fails) retries forever. Such a pod is moved to another
node, a few times. If it starts nowhere, the nodes are not the cause.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from orchestrator.backends.kubernetes.api.api_errors import Forbidden
from orchestrator.backends.kubernetes.api.client import Api
from orchestrator.backends.kubernetes.controller import controller_client
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
from orchestrator.backends.kubernetes.observe.pending_reasons import pod_problem
from orchestrator.backends.kubernetes.pod_deletion import end_pod, node_answers
from orchestrator.backends.kubernetes.render import names
from orchestrator.backends.kubernetes.resources import JOB_KINDS, PODS, Object, name_of
from orchestrator.backends.kubernetes.status_cache import events_of
from orchestrator.contract.launch import LaunchPlan
from orchestrator.errors import BackendError

log = logging.getLogger(__name__)

BEGIN_S = 120.0
"""Time for the pod to start on its node; at most half of `pod_patience`."""
YOUNG_S = 300.0
"""Time for a running pod to be heard; it may wait for its predecessor's lock."""
MOST = 3
"""How many times one launch moves the leader's pod to another node."""
CLOCKS_S = 3.0
"""Clock difference between the API server and the nodes, which report whole seconds."""


class Fate(Struct, frozen=True, kw_only=True):
    """The decision about the leader's pod."""

    pod: Object
    does: Literal["wait", "end", "move", "move-if-silent"]
    """`wait` for the pod; `end` it, so that it is recreated; `move` it: end it and exclude its
    node; `move-if-silent`: move it if its node is unreachable."""
    why: str


def fate_of(
    pods: Sequence[Object],
    events: Sequence[Object],
    now: float,
    *,
    silent_s: float | None,
    patience_s: float,
) -> Fate | None:
    """None: no such pod exists; the operator will create it."""
    pod = next((one for one in alive(pods) if leads(one)), None)
    if pod is None:
        return None
    host = node_of(pod)
    # Without a node there is nothing to move the pod away from.
    if not host:
        trouble = pod_problem(pod, events)
        return Fate(pod=pod, does="wait", why=str(trouble or "no node is assigned yet"))
    # The operator creates a successor only when this pod is gone.
    if is_leaving(pod):
        return Fate(pod=pod, does="end", why=f"it is being deleted but still runs on {host}")
    if has_begun(pod):
        return _of_one_that_runs(pod, now - begun_at(pod), silent_s)
    waited_s = now - scheduled_at(pod)
    # Image pull and mounts take a while on a healthy node, too.
    if waited_s < min(BEGIN_S, patience_s / 2):
        return Fate(pod=pod, does="wait", why=f"it was scheduled to {host} {waited_s:.0f} s ago")
    trouble = pod_problem(pod, events)
    if trouble is None:  # pulling a large image takes long
        return Fate(pod=pod, does="move-if-silent", why=f"{host} is unreachable")
    why = f"it has not started on {host} for {waited_s:.0f} s, {trouble.what}: {trouble.why}"
    return Fate(pod=pod, does="move", why=why)


def _of_one_that_runs(pod: Object, age_s: float, silent_s: float | None) -> Fate:
    # A new pod first needs time: its agent starts, and it may wait for a lock of its predecessor.
    if silent_s is None or age_s < min(silent_s + CLOCKS_S, YOUNG_S):
        return Fate(pod=pod, does="wait", why=f"started {age_s:.0f} s ago: waiting for its agent")
    return Fate(pod=pod, does="end", why=f"no heartbeat from its agent for {silent_s:.0f} s")


def revive(
    api: Api,
    namespace: str,
    launch: LaunchPlan,
    exclude: Callable[[Sequence[str]], None],
    *,
    silent_s: float | None,
) -> None:
    """Raises BackendError without the right, or when moving the pod cannot help."""
    spec = launch.kubernetes_spec
    pods = api.list(PODS, namespace, labels=f"{LABEL}={launch.job}").items
    events, unseen = events_of(api, namespace)
    if unseen:
        log.warning("cannot read why the leader's pod does not start: %s", unseen)
    patience_s = spec.pod_patience
    fate = fate_of(pods, events, api.clock.now(), silent_s=silent_s, patience_s=patience_s)
    if fate is None:
        log.info("the operator has not created the leader's pod yet")
        return
    pod, host = fate.pod, node_of(fate.pod)
    # A reachable node makes progress with a large image, so moving the pod would only begin the
    # pull again.
    if fate.does == "move-if-silent" and node_answers(api, host) is not False:
        fate = replace(fate, does="wait", why=f"it is being created on {host}")
    if fate.does == "wait":
        log.info("waiting for the leader's pod %s: %s", name_of(pod), fate.why)
        return
    log.warning("replacing the leader's pod %s: %s", name_of(pod), fate.why)
    if fate.does != "end":
        # The note comes before the deletion: otherwise a crash in between would allow more moves
        # than `MOST`.
        if not _noted(api, namespace, launch, fate):
            return
        exclude([host])
    end_pod(api, spec.kind, host, pod, spec.force_delete_after)


def _noted(api: Api, namespace: str, launch: LaunchPlan, fate: Fate) -> bool:
    """Record the move before deleting the pod. False: check again later."""
    kind = JOB_KINDS[launch.kubernetes_spec.kind]
    job = api.get(kind.resource, namespace, launch.job)
    if job is None or launch_of(job) != launch.launch:
        log.info("%s was replaced by another job: keeping its pod", launch.job)
        return False
    name, host = name_of(fate.pod), node_of(fate.pod)
    way = (
        f"`kubectl -n {namespace} describe pod {name}` shows why; to move it to another node:"
        f" `kubectl cordon {host}` and `kubectl -n {namespace} delete pod {name}`"
    )

    def change(notes: Mapping[str, str]) -> Mapping[str, str]:
        before = moved_from(notes)
        # Several nodes failed alike, so the image or a volume is the likely reason.
        if len(before) >= MOST:
            where = ", ".join(before)
            words = f"{fate.why}; it was already moved away from {where}, so it is not moved again"
            raise BackendError(f"the leader's pod {name} does not start: {words}", fix=way)
        return {names.NEVER_BEGAN_ANNOTATION: ",".join((*before, host))}

    try:
        return controller_client.note(api, namespace, launch.job, change, tries=1)
    except Forbidden as exc:
        words = f"{fate.why}; and ndctl has no right to record that it was moved off {host}"
        fix = f"{way}\n  or {exc.fix}"
        raise BackendError(
            f"the leader's pod {name} does not start: {words}: {exc.message}", fix=fix
        ) from exc


def moved_from(notes: Mapping[str, str]) -> tuple[str, ...]:
    """Nodes that the pod was moved away from, with repetitions."""
    return tuple(filter(None, notes.get(names.NEVER_BEGAN_ANNOTATION, "").split(",")))
