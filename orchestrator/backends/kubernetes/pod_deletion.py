"""Deletes pods and waits for their end: one pod whose node may be unreachable, or all of a job."""

import logging

from orchestrator.backends.kubernetes.api.api_errors import Forbidden
from orchestrator.backends.kubernetes.api.client import Api
from orchestrator.backends.kubernetes.api.watch_cache import ListWatch
from orchestrator.backends.kubernetes.controller import controller_client
from orchestrator.backends.kubernetes.finalizers import by_force
from orchestrator.backends.kubernetes.node_affinity import INSTALL
from orchestrator.backends.kubernetes.observe.object_fields import LABEL, alive, is_leaving
from orchestrator.backends.kubernetes.resources import (
    JOB_KINDS,
    NODES,
    PODS,
    Object,
    lookup,
    name_of,
)
from orchestrator.contract.spec.kubernetes_spec import Kind
from orchestrator.errors import BackendError, MustLeave, Unanswered
from orchestrator.inventory.kubernetes.nodes import READY, parse_node

log = logging.getLogger(__name__)

CLEAR_S = 120.0
"""Time limit for all pods to end, added to their own grace period."""
GRACE_S = 30.0
"""Kubernetes' default of terminationGracePeriodSeconds."""
FORCED_S = 30.0
"""How long the controller may take to force the deletion once it is due."""
NAMED: tuple[Kind, ...] = ("pytorchjob",)
"""Kinds with predictable pod names: the pods' account may delete pods by these names."""


def end_pod(api: Api, kind: Kind, host: str, pod: Object, force_after_s: float) -> None:
    """Delete a pod and wait until it is gone.

    An unreachable node never reports the end of its pod, so the deletion is then forced. Without
    the right to read nodes, it is forced when a reachable node would have ended the pod.

    Raises:
        MustLeave: only the controller may delete pods of this kind, and none does.
    """
    if kind not in NAMED:
        _end_by_controller(api, kind, host, pod, force_after_s)
        return
    namespace, name, uid = pod["metadata"]["namespace"], name_of(pod), pod["metadata"]["uid"]
    if not is_leaving(pod):
        api.delete(PODS, namespace, name, uid=uid)
    # Force is the last resort: Kubernetes would forget the pod while its process may still run and
    # write.
    if _goes(api, host, pod, api.clock.monotonic() + force_after_s):
        return
    try:
        api.delete(PODS, namespace, name, grace_s=0, uid=uid)
    except BackendError as exc:
        raise BackendError(
            f"pod {name} stays on {host}, which is unreachable: {exc.message}",
            fix=f"`{by_force(pod)}`" + (f"\n  or {exc.fix}" if exc.fix else ""),
        ) from exc


def _end_by_controller(api: Api, kind: Kind, host: str, pod: Object, force_after_s: float) -> None:
    """The controller marks the pod Failed and forces its deletion if its node is dead."""
    metadata, name = pod["metadata"], name_of(pod)
    job, of = metadata["labels"][LABEL], JOB_KINDS[kind].resource.kind
    way = f"`{by_force(pod)}`\n  or an administrator types `{INSTALL}`, and it is done by itself"
    deadline = api.clock.monotonic() + force_after_s
    asked = is_leaving(pod) or controller_client.end(api, metadata["namespace"], kind, job, pod)
    if not asked:
        raise MustLeave(
            f"pod {name} on {host} is not deleted: only the controller may delete pods of a {of},"
            " and none manages this job",
            fix=way,
        )
    # The controller forces the deletion at the same time as this deadline, so give it a little
    # longer.
    gone = _goes(api, host, pod, deadline)
    if not gone and not _gone(api, pod, api.clock.monotonic() + FORCED_S):
        raise BackendError(
            f"pod {name} stays on {host}, which is unreachable: only the controller may delete"
            f" pods of a {of} by force, and it has not",
            fix=way,
        )


def _goes(api: Api, host: str, pod: Object, deadline: float) -> bool:
    """Whether it ends by itself; False: its node is unreachable, so only force helps.

    Raises Unanswered if the node is reachable but the pod does not end.
    """
    grace_s = float(lookup(pod, ("spec", "terminationGracePeriodSeconds"), GRACE_S))
    if _gone(api, pod, deadline):
        return True
    answers = node_answers(api, host)
    # The node is reachable or unknown: the pod may use all of its grace period, for example to save
    # a checkpoint.
    if answers is not False:
        if _gone(api, pod, deadline + grace_s):
            return True
        answers = node_answers(api, host)
    # Force would not help here: something in the cluster, such as a finalizer, holds the pod.
    if answers:
        name, namespace = name_of(pod), pod["metadata"]["namespace"]
        raise Unanswered(
            f"pod {name} on {host} does not terminate although its node is reachable",
            fix=f"`kubectl -n {namespace} describe pod {name}` shows what blocks it",
        )
    return False


def node_answers(api: Api, host: str) -> bool | None:
    """Whether the node is reachable; None without the right to read nodes."""
    try:
        node = api.get(NODES, None, host)
    except Forbidden as exc:
        log.warning("cannot read whether %s is reachable: %s", host, exc)
        return None
    return node is not None and parse_node(node).ready == READY


def _gone(api: Api, pod: Object, deadline: float) -> bool:
    """Whether this pod is deleted before the deadline. Checks at least once."""
    metadata = pod["metadata"]
    for cache in _watching(api, metadata["namespace"], metadata["labels"][LABEL]).changes(deadline):
        if all(one["metadata"]["uid"] != metadata["uid"] for one in cache.items.values()):
            return True
    return False


def await_no_pods(api: Api, namespace: str, job: str) -> None:
    """Raises BackendError if pods remain."""
    left: list[Object] = []
    deadline = api.clock.monotonic() + CLEAR_S + GRACE_S
    for cache in _watching(api, namespace, job).changes(deadline):
        left = alive(list(cache.items.values()))
        if not left:
            return
    names = ", ".join(name_of(pod) for pod in left[:3]) or "unknown pods"
    raise BackendError(
        f"pods of {job} do not terminate: {names}",
        fix=f"`kubectl -n {namespace} get pods -l {LABEL}={job} -o wide`; where a node"
        " is unreachable, `kubectl delete pod NAME --force --grace-period=0`",
    )


def _watching(api: Api, namespace: str, job: str) -> ListWatch:
    return ListWatch(api=api, resource=PODS, namespace=namespace, labels=f"{LABEL}={job}")
