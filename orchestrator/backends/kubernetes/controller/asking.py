"""What a leader has of the controller, where there is one that answers: a gang restart; nodes to
which no pod of the job comes."""

import logging
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from orchestrator.backends.kubernetes import fields
from orchestrator.backends.kubernetes.api import Api
from orchestrator.backends.kubernetes.controller.wish import GangRestart, annotations_of
from orchestrator.backends.kubernetes.refusals import Conflict, Forbidden
from orchestrator.backends.kubernetes.render import names
from orchestrator.backends.kubernetes.resources import (
    JOB_KINDS,
    LEASES,
    PODS,
    JobKind,
    Object,
    lookup,
    name_of,
)
from orchestrator.contract.kubernetes import KubernetesSpec
from orchestrator.contract.launch import LaunchPlan
from orchestrator.seams import Clock

log = logging.getLogger(__name__)

LEASE = "ndctl-controller"
PATIENCE_S = 20.0
"""For the controller to begin, beyond the duration of its Lease: another may have to take over."""
LOOK_S = 1.0
SKEW_S = 60.0
"""Between the clock of the controller and ours, at most."""


def ask(api: Api, clock: Clock, namespace: str, launch: LaunchPlan, wish: GangRestart) -> bool:
    """Whether a controller takes all pods away and sees to new ones. False: the caller has to.

    That it lives is what its Lease says; that it does it is seen, and else the wish is withdrawn.
    """
    kind = JOB_KINDS[(launch.kubernetes or KubernetesSpec()).kind]
    job = api.get(kind.resource, namespace, launch.job)
    if job is None or fields.launch_of(job) != launch.launch:
        return False
    duration_s = _lives_for(api, clock, job)
    if duration_s is None:
        return False
    note = {"metadata": {"annotations": {names.GANG_ANNOTATION: wish.text()}}}
    api.merge(kind.resource, namespace, launch.job, note)
    deadline = clock.monotonic() + duration_s + PATIENCE_S
    while clock.monotonic() < deadline:
        job = api.get(kind.resource, namespace, launch.job)
        if _is_begun(kind, job):
            return True
        clock.sleep(LOOK_S)
    return not _withdrawn(api, kind, namespace, launch.job)


def kept_off(api: Api, clock: Clock, namespace: str, job: Object, hosts: Sequence[str]) -> bool:
    """Whether a controller keeps the next pods of `job` off `hosts`, of which it was written down
    that they are left out: they are to go after that alone, or they might be there again first."""
    duration_s = _lives_for(api, clock, job)
    if duration_s is None:
        return False
    missing = [names.placeholder_of(name_of(job), host) for host in hosts]
    deadline = clock.monotonic() + duration_s + PATIENCE_S
    while missing and clock.monotonic() < deadline:
        missing = [name for name in missing if api.get(PODS, namespace, name) is None]
        if missing:
            clock.sleep(LOOK_S)
    return not missing


def _lives_for(api: Api, clock: Clock, job: Object) -> float | None:
    """The duration of the Lease of the job's controller, None where that lives no more."""
    home = annotations_of(job).get(names.CONTROLLER_ANNOTATION)
    if home is None:
        return None
    try:
        lease = api.get(LEASES, home, LEASE)
    except Forbidden as exc:
        log.warning("whether a controller is there cannot be seen, so it is not asked: %s", exc)
        return None
    spec: Mapping[str, Any] = lookup(lease, ("spec",), {})
    duration_s = float(spec.get("leaseDurationSeconds") or 0)
    if not spec.get("holderIdentity") or not spec.get("renewTime"):
        return None
    renewed = datetime.fromisoformat(spec["renewTime"]).astimezone(UTC).timestamp()
    age_s = clock.now() - renewed
    return duration_s if age_s <= duration_s + SKEW_S else None


def _is_begun(kind: JobKind, job: Object | None) -> bool:
    """Suspended, or, of a job in a queue, done already."""
    if job is None or lookup(job, kind.suspend) is True:
        return True
    return names.GANG_ANNOTATION not in annotations_of(job)


def _withdrawn(api: Api, kind: JobKind, namespace: str, name: str) -> bool:
    """Whether the wish is gone before the controller took it up."""
    while True:
        job = api.get(kind.resource, namespace, name)
        if job is None or _is_begun(kind, job):
            return False
        version = job["metadata"]["resourceVersion"]
        metadata = {"annotations": {names.GANG_ANNOTATION: None}, "resourceVersion": version}
        try:
            api.merge(kind.resource, namespace, name, {"metadata": metadata})
        except Conflict:
            continue
        log.warning("the controller does not answer: the pods are given back without it")
        return True
