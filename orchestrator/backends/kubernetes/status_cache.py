"""The status of jobs, with as few API requests as possible."""

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from orchestrator.backends.kubernetes.api.api_errors import Forbidden
from orchestrator.backends.kubernetes.api.client import Api
from orchestrator.backends.kubernetes.observe import object_fields, observe
from orchestrator.backends.kubernetes.observe.object_fields import LABEL, deleted_at, is_leaving
from orchestrator.backends.kubernetes.observe.observe import Observed
from orchestrator.backends.kubernetes.observe.pending_reasons import PendingReason
from orchestrator.backends.kubernetes.render import names
from orchestrator.backends.kubernetes.resources import (
    CONFIG_MAPS,
    EVENTS,
    NAMESPACES,
    PODS,
    JobKind,
    Object,
    name_of,
)
from orchestrator.contract.launch import LaunchPlan
from orchestrator.errors import BackendError


def look(api: Api, namespace: str, kind: JobKind, launches: Sequence[LaunchPlan]) -> list[Observed]:
    """Launches of one namespace and kind: list objects, pods and events once for all."""
    jobs: dict[str, Object]
    # One job is read by name. For several, one list of all jobs costs less than a request for each.
    if len(launches) == 1:
        job = api.get(kind.resource, namespace, launches[0].job)
        jobs = {} if job is None else {name_of(job): job}
    else:
        listed = api.list(kind.resource, namespace, labels=LABEL)
        jobs = {name_of(job): job for job in listed.items}
    label = f"{LABEL}={launches[0].job}" if len(launches) == 1 else LABEL
    pods = api.list(PODS, namespace, labels=label).items
    # Only a waiting job needs its events to explain why.
    calm = jobs and all(object_fields.is_running(pod) for pod in pods)
    whole = len(pods) >= sum(len(one.hosts) for one in launches)
    events, unseen = ((), "") if calm and whole else events_of(api, namespace)
    seen = [
        observe.observe(
            kind,
            shown_name(kind, namespace, one.job),
            jobs.get(one.job),
            pods,
            events,
            hosts=len(one.hosts),
        )
        for one in launches
    ]
    seen = _with_notes(api, namespace, seen, jobs)
    if unseen:
        seen = [_without_events(one, unseen) for one in seen]
    if all(one.meaning not in ("missing", "leaving") for one in seen):
        return seen
    gone, at = namespace_gone(api, namespace)
    return [_with_namespace(one, at) if gone else one for one in seen]


def events_of(api: Api, namespace: str) -> tuple[Sequence[Object], str]:
    """All events of the namespace; without the right, none and the missing right."""
    try:
        return api.list(EVENTS, namespace, cached=True).items, ""
    except Forbidden as exc:
        return (), exc.message


def _without_events(seen: Observed, why: str) -> Observed:
    """Adds that the reason is unknown, if a waiting job could only be explained by its events."""
    if seen.troubles or seen.meaning not in ("waiting", "suspended"):
        return seen
    said = PendingReason(
        what="unknown reason", why=why, advice="ask an administrator for that right"
    )
    return replace(seen, troubles=(said,))


def _with_namespace(seen: Observed, at: float | None) -> Observed:
    if seen.meaning not in ("missing", "leaving"):
        return seen
    return replace(seen, with_namespace=True, deleted_at=at or seen.deleted_at)


def namespace_gone(api: Api, namespace: str) -> tuple[bool, float | None]:
    """Whether and when the namespace was deleted, as far as we may read it."""
    try:
        found = api.get(NAMESPACES, None, namespace)
    except BackendError:  # without the right to read it, assume that only the job was deleted
        return False, None
    return found is None or is_leaving(found), deleted_at(found or {})


def _with_notes(
    api: Api, namespace: str, seen: list[Observed], jobs: Mapping[str, Object]
) -> list[Observed]:
    """With the notes of the job's pods, for a single job only: it costs one request each."""
    # A list of many jobs would need one request for each of them.
    if len(seen) != 1 or not jobs:
        return seen
    ((name, job),) = jobs.items()
    try:
        about = api.about(CONFIG_MAPS, namespace, names.config_map_of(name))
    # The notes only add details to the status, so it is shown without them.
    except BackendError:
        return seen
    return [observe.with_notes(seen[0], job, object_fields.annotations_of(about))]


def shown_name(kind: JobKind, namespace: str, job: str) -> str:
    return f"{kind.resource.kind} {namespace}/{job}" if namespace else f"{kind.resource.kind} {job}"
