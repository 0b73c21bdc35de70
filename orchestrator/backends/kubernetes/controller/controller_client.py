"""How pods send requests to the controller: annotations of the job's ConfigMap.

Without a controller nothing happens, and the annotations wait for one. The functions here then
return false, and callers do what they can do themselves.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from orchestrator.backends.kubernetes.api.api_errors import Conflict, Forbidden
from orchestrator.backends.kubernetes.api.client import Api
from orchestrator.backends.kubernetes.controller.pod_requests import (
    MOST_NODES,
    GangRestart,
    digest_of,
    excluded_of,
    number_in,
)
from orchestrator.backends.kubernetes.observe import object_fields
from orchestrator.backends.kubernetes.render import names
from orchestrator.backends.kubernetes.render.topology import CHANGEABLE
from orchestrator.backends.kubernetes.resources import (
    CONFIG_MAPS,
    JOB_KINDS,
    LEASES,
    PODS,
    JobKind,
    Object,
    lookup,
    name_of,
)
from orchestrator.contract.launch import LaunchPlan
from orchestrator.contract.spec.kubernetes_spec import Kind
from orchestrator.errors import BackendError

log = logging.getLogger(__name__)

LEASE = "ndctl-controller"
PATIENCE_S = 20.0
"""Time for the controller to act, added to its Lease duration (a standby may take over)."""
LOOK_S = 1.0
SKEW_S = 60.0
"""Largest clock difference to the controller."""
TRIES = 5
"""Tries, because other pods of the job may change the ConfigMap at the same time."""
Notes = Mapping[str, str]
Changed = Mapping[str, str | None]


def note(
    api: Api, namespace: str, job: str, change: Callable[[Notes], Changed], *, tries: int = TRIES
) -> bool:
    """Change annotations of the job's ConfigMap, based on their current values, because other pods
    of the job write there too. False if each try lost against another pod.

    Raises:
        BackendError: the ConfigMap does not exist, or the right is missing.
    """
    name = names.config_map_of(job)
    for _ in range(tries):
        found = api.get(CONFIG_MAPS, namespace, name)
        if found is None:
            raise BackendError(
                f"there is no ConfigMap {name} in namespace {namespace}: pods of {job} cannot"
                " send requests to the controller",
                fix="submit the job again, or apply the output of `ndctl render`",
            )
        # The change is computed again from the new values at each try, so that another pod's note
        # is kept.
        changed = change(object_fields.annotations_of(found))
        if not changed:
            return True
        version = found["metadata"]["resourceVersion"]
        metadata = {"annotations": dict(changed), "resourceVersion": version}
        try:
            api.merge(CONFIG_MAPS, namespace, name, {"metadata": metadata})
        except Conflict:
            continue
        return True
    return False


def avoid(hosts: Sequence[str]) -> Callable[[Notes], Changed]:
    """A change for `note`: no new pod of the job may run on `hosts`."""

    def change(notes: Notes) -> Changed:
        before = _listed(notes, names.AVOID_ANNOTATION)
        every = list(dict.fromkeys((*before, *hosts)))
        # Nothing is written if nothing changes, because each write wakes all watchers.
        if len(every) == len(before):
            return {}
        if len(every) > MOST_NODES:
            # The newest are kept: the controller would refuse the whole list, and the newest
            # failures matter most.
            log.warning(
                "the job excludes %d nodes but the controller accepts %d: ignoring %s",
                *(len(every), MOST_NODES, ", ".join(every[:-MOST_NODES])),
            )
        return {names.AVOID_ANNOTATION: ",".join(every[-MOST_NODES:])}

    return change


def count_requeue(notes: Notes) -> Changed:
    """A change for `note`: count one more requeue of all pods."""
    count = number_in({"metadata": {"annotations": notes}}, names.REQUEUES_ANNOTATION)
    return {names.REQUEUES_ANNOTATION: str(count + 1)}


def restarts_of(api: Api, namespace: str, job: str, found: Object | None) -> int:
    """How often all pods of the job were recreated: by the controller (noted on the job), plus by
    its leaders (noted on the ConfigMap)."""
    noted = api.about(CONFIG_MAPS, namespace, names.config_map_of(job))
    by_leaders = number_in(noted or {}, names.REQUEUES_ANNOTATION)
    return number_in(found or {}, names.RESTARTS_ANNOTATION) + by_leaders


def _listed(notes: Notes, annotation: str) -> tuple[str, ...]:
    return tuple(filter(None, notes.get(annotation, "").split(",")))


def ask(api: Api, namespace: str, launch: LaunchPlan, request: GangRestart) -> bool:
    """Ask the controller to replace all pods. False: the caller has to do it.

    The Lease shows whether a controller is alive. If it does not act in time, the request is
    withdrawn. A controller that starts at that very moment still restarts the job; then the pods
    are replaced twice, which is harmless.
    """
    kind = JOB_KINDS[launch.kubernetes_spec.kind]
    job = api.get(kind.resource, namespace, launch.job)
    # The object belongs to a later launch, whose pods must not be replaced.
    if job is None or object_fields.launch_of(job) != launch.launch:
        return False
    duration_s = lives_for(api, job)
    # No controller is alive, so do not wait for an answer.
    if duration_s is None:
        return False
    text = request.text()
    note(api, namespace, launch.job, lambda _: {names.GANG_ANNOTATION: text})
    deadline = api.clock.monotonic() + duration_s + PATIENCE_S
    # The Lease duration is included: the controller may have just died, and a standby takes over
    # only after it.
    while api.clock.monotonic() < deadline:
        if _is_begun(kind, api.get(kind.resource, namespace, launch.job), text):
            return True
        api.clock.sleep(LOOK_S)
    # Otherwise a controller that starts later would restart the job, although the caller has
    # replaced the pods by then.
    note(api, namespace, launch.job, lambda _: {names.GANG_ANNOTATION: None})
    # It may have begun between the last look and the withdrawal.
    if _is_begun(kind, api.get(kind.resource, namespace, launch.job), text):
        return True
    log.warning("no answer from the controller: requeueing the pods without it")
    return False


def _is_begun(kind: JobKind, job: Object | None, text: str) -> bool:
    """The controller has suspended the job, or (for a queued job) is already done."""
    # A deleted job ends its pods as well, so the caller has nothing to do.
    if job is None or lookup(job, kind.suspend) is True:
        return True
    return object_fields.annotations_of(job).get(names.RESTARTED_ANNOTATION) == digest_of(text)


def kept_off(api: Api, namespace: str, kind: Kind, job: Object, hosts: Sequence[str]) -> bool:
    """Wait until a controller excludes `hosts` for new pods of `job`; false if none does.

    Delete pods only after this; otherwise their successors could start on the same hosts.
    """
    duration_s = lives_for(api, job)
    if duration_s is None:
        return False
    deadline = api.clock.monotonic() + duration_s + PATIENCE_S
    while not (done := _is_kept_off(api, namespace, kind, name_of(job), hosts)):
        if api.clock.monotonic() >= deadline:
            break
        api.clock.sleep(LOOK_S)
    return done


def _is_kept_off(api: Api, namespace: str, kind: Kind, name: str, hosts: Sequence[str]) -> bool:
    job = api.get(JOB_KINDS[kind].resource, namespace, name)
    if job is None or not {*hosts} <= {*excluded_of(job)}:
        return False
    # The job's pod template excludes the nodes, which takes effect at once. Other kinds need a
    # placeholder pod on each node.
    if kind in CHANGEABLE:
        return True
    placeholders = (names.placeholder_of(name, host) for host in hosts)
    return all(api.get(PODS, namespace, each) is not None for each in placeholders)


def end(api: Api, namespace: str, kind: Kind, job: str, pod: Object) -> bool:
    """Ask the controller to delete a pod of the job, because the pods' account may not; false if
    none does. If the pod's node is unreachable, the controller also forces the deletion."""
    found = api.get(JOB_KINDS[kind].resource, namespace, job)
    duration_s = None if found is None else lives_for(api, found)
    if duration_s is None:
        return False
    uid, name = pod["metadata"]["uid"], name_of(pod)
    there = {one["metadata"]["uid"] for one in _pods(api, namespace, job)}

    def change(notes: Notes) -> Changed:
        # Requests for deleted pods are done, so drop them.
        before = _listed(notes, names.END_ANNOTATION)
        left = [word for word in before if word.rpartition("/")[2] in there]
        return {names.END_ANNOTATION: ",".join(dict.fromkeys((*left, f"{name}/{uid}")))}

    note(api, namespace, job, change)
    deadline = api.clock.monotonic() + duration_s + PATIENCE_S
    while api.clock.monotonic() < deadline:
        now = api.get(PODS, namespace, name)
        # Another uid: the operator has created the successor already.
        if now is None or now["metadata"]["uid"] != uid or object_fields.is_leaving(now):
            return True
        api.clock.sleep(LOOK_S)
    return False


def _pods(api: Api, namespace: str, job: str) -> tuple[Object, ...]:
    return api.list(PODS, namespace, labels=f"{names.JOB_LABEL}={job}").items


def lives_for(api: Api, job: Object) -> float | None:
    """Lease duration of the job's controller; None if it is not alive."""
    home = object_fields.annotations_of(job).get(names.CONTROLLER_ANNOTATION)
    return None if home is None else lease_s(api, home)


def lease_s(api: Api, home: str) -> float | None:
    """Lease duration of the controller in namespace `home`; None if none is alive."""
    try:
        lease = api.get(LEASES, home, LEASE)
    except Forbidden as exc:
        log.warning("cannot check for a controller, so not asking one: %s", exc)
        return None
    spec: Mapping[str, Any] = lookup(lease, ("spec",), {})
    duration_s = float(spec.get("leaseDurationSeconds") or 0)
    # A controller that ended has released the Lease.
    if not spec.get("holderIdentity") or not spec.get("renewTime"):
        return None
    renewed = datetime.fromisoformat(spec["renewTime"]).astimezone(UTC).timestamp()
    # The times are from two clocks, so a Lease counts as alive a little longer. Too long only
    # delays the caller.
    age_s = api.clock.now() - renewed
    return duration_s if age_s <= duration_s + SKEW_S else None
