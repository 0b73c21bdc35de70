"""Pods that are to go: one whose node may not answer, or all of a job."""

import contextlib
import logging

from orchestrator.backends.kubernetes.api import Api
from orchestrator.backends.kubernetes.fields import LABEL, alive, is_leaving
from orchestrator.backends.kubernetes.refusals import Forbidden, Missing
from orchestrator.backends.kubernetes.resources import NODES, PODS, Object, lookup, name_of
from orchestrator.backends.kubernetes.tracked import by_force, failed, is_held
from orchestrator.backends.kubernetes.watching import Watching
from orchestrator.cluster.kubernetes.nodes import READY, parse_node
from orchestrator.errors import BackendError, Unanswered
from orchestrator.seams import Clock

log = logging.getLogger(__name__)

CLEAR_S = 120.0
"""For all pods to be gone, beyond their own grace period."""
GRACE_S = 30.0
"""Kubernetes' default of terminationGracePeriodSeconds."""


def end_pod(api: Api, clock: Clock, host: str, pod: Object, force_after_s: float) -> None:
    """Delete a pod and see it go.

    A node that does not answer never says that its pod is gone: then it goes by force; also where
    we may not read nodes, once a node that answers would have ended it.
    """
    namespace, name, uid = pod["metadata"]["namespace"], name_of(pod), pod["metadata"]["uid"]
    if not is_leaving(pod):
        api.delete(PODS, namespace, name, uid=uid)
    grace_s = float(lookup(pod, ("spec", "terminationGracePeriodSeconds"), GRACE_S))
    deadline = clock.monotonic() + force_after_s
    if _gone(api, clock, pod, deadline):
        return
    answers = node_answers(api, host)
    if answers is not False:
        if _gone(api, clock, pod, deadline + grace_s):
            return
        answers = node_answers(api, host)
    if answers:
        raise Unanswered(
            f"pod {name} on {host} does not end, though its node answers",
            fix=f"`kubectl -n {namespace} describe pod {name}` shows what holds it",
        )
    try:
        if is_held(pod):
            with contextlib.suppress(Missing):
                api.merge(PODS, namespace, name, failed(pod), "status")
        api.delete(PODS, namespace, name, grace_s=0, uid=uid)
    except BackendError as exc:
        raise BackendError(
            f"pod {name} stays on {host}, which does not answer: {exc.message}",
            fix=f"`{by_force(pod)}`" + (f"\n  or {exc.fix}" if exc.fix else ""),
        ) from exc


def node_answers(api: Api, host: str) -> bool | None:
    """Whether a node does; None where we may not know."""
    try:
        node = api.get(NODES, None, host)
    except Forbidden as exc:
        log.warning("whether %s answers is not known: %s", host, exc)
        return None
    return node is not None and parse_node(node).ready == READY


def _gone(api: Api, clock: Clock, pod: Object, deadline: float) -> bool:
    """Whether this very pod goes away until then; looked at once in any case."""
    metadata = pod["metadata"]
    for cache in _watching(api, clock, metadata["namespace"], metadata["labels"][LABEL]).changes(
        deadline
    ):
        if all(one["metadata"]["uid"] != metadata["uid"] for one in cache.items.values()):
            return True
    return False


def await_no_pods(api: Api, clock: Clock, namespace: str, job: str) -> None:
    """Raises BackendError where some stay."""
    left: list[Object] = []
    deadline = clock.monotonic() + CLEAR_S + GRACE_S
    for cache in _watching(api, clock, namespace, job).changes(deadline):
        left = alive(list(cache.items.values()))
        if not left:
            return
    names = ", ".join(name_of(pod) for pod in left[:3]) or "which ones is not known"
    raise BackendError(
        f"pods of {job} do not end: {names}",
        fix=f"`kubectl -n {namespace} get pods -l {LABEL}={job} -o wide`; where a node"
        " does not answer, `kubectl delete pod NAME --force --grace-period=0`",
    )


def _watching(api: Api, clock: Clock, namespace: str, job: str) -> Watching:
    return Watching(
        api=api, clock=clock, resource=PODS, namespace=namespace, labels=f"{LABEL}={job}"
    )
