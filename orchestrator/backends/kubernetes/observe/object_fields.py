"""Meaning of single fields of jobs, pods and events. Pure."""

from collections.abc import Mapping, Sequence
from datetime import datetime

from orchestrator.backends.kubernetes.render import names
from orchestrator.backends.kubernetes.resources import Object, lookup, name_of

LABEL = names.JOB_LABEL
LAUNCH = names.LAUNCH_ANNOTATION
CANCELLED = names.CANCELLED_ANNOTATION
QUEUE = names.QUEUE_LABEL
INDEX = "batch.kubernetes.io/job-completion-index"


def annotations_of(item: Object | None) -> Mapping[str, str]:
    found: Mapping[str, str] = lookup(item, ("metadata", "annotations"), {})
    return found


def launch_of(item: Object) -> int | None:
    """The launch number of an object."""
    said = lookup(item, ("metadata", "annotations", LAUNCH), "")
    return int(said) if str(said).isdigit() else None


def pods_of(job: Object, pods: Sequence[Object]) -> list[Object]:
    name = name_of(job)
    return [pod for pod in pods if lookup(pod, ("metadata", "labels", LABEL)) == name]


def alive(pods: Sequence[Object]) -> list[Object]:
    """Pods that may still have processes."""
    return [pod for pod in pods if not is_over(pod)]


def is_over(pod: Object) -> bool:
    return phase_of(pod) in ("Succeeded", "Failed")


def phase_of(pod: Object) -> str:
    return str(lookup(pod, ("status", "phase"), "Pending"))


def is_running(pod: Object) -> bool:
    return phase_of(pod) == "Running" and not is_leaving(pod)


def is_leaving(pod: Object) -> bool:
    return lookup(pod, ("metadata", "deletionTimestamp")) is not None


def deleted_at(item: Object) -> float | None:
    """Unix seconds at which the deletion was requested; None if it was not. The deletionTimestamp
    is the end of the grace period, so the period is subtracted."""
    until = lookup(item, ("metadata", "deletionTimestamp"))
    if until is None:
        return None
    return seconds_of(until) - float(lookup(item, ("metadata", "deletionGracePeriodSeconds"), 0))


def begun_at(pod: Object) -> float:
    """Unix seconds at which the pod was created, or at which its current container started."""
    states = lookup(pod, ("status", "containerStatuses"), ())
    starts = [lookup(one, ("state", "running", "startedAt")) for one in states]
    stamps = [lookup(pod, ("metadata", "creationTimestamp")), *starts]
    return max((seconds_of(one) for one in stamps if one), default=0.0)


def has_begun(pod: Object) -> bool:
    """Whether its container runs or has ever run."""
    for one in lookup(pod, ("status", "containerStatuses"), ()):
        states = {*(one.get("state") or {}), *(one.get("lastState") or {})}
        if one.get("restartCount") or states & {"running", "terminated"}:
            return True
    return False


def scheduled_at(pod: Object) -> float:
    """Unix seconds at which the pod was bound to its node."""
    bound = conditions_of(pod).get("PodScheduled", {})
    stamp = bound.get("lastTransitionTime") or lookup(pod, ("metadata", "creationTimestamp"))
    return seconds_of(stamp) if stamp else 0.0


def leads(pod: Object) -> bool:
    """The pod has node rank 0. Kubernetes before 1.28 has the index only as an annotation."""
    metadata: Mapping[str, Mapping[str, str]] = pod["metadata"]
    labels, notes = metadata.get("labels") or {}, metadata.get("annotations") or {}
    index = labels.get(INDEX) or notes.get(INDEX)
    return labels.get("training.kubeflow.org/replica-type") == "master" or index == "0"


def seconds_of(stamp: str) -> float:
    """Unix seconds of a Kubernetes timestamp."""
    return datetime.fromisoformat(stamp).timestamp()


def node_of(pod: Object) -> str:
    return str(lookup(pod, ("spec", "nodeName"), ""))


def conditions_of(item: Object) -> Mapping[str, Object]:
    """Conditions whose status is True."""
    found = lookup(item, ("status", "conditions"), ())
    return {str(one.get("type")): one for one in found if one.get("status") == "True"}


def said_of(condition: Object) -> str:
    return one_line(str(condition.get("message") or condition.get("reason") or ""))


def one_line(text: str) -> str:
    return " ".join(text.split())


def is_about(event: Object, item: Object) -> bool:
    """Compares uids, because an earlier or later object may have the same name."""
    said = str(lookup(event, ("involvedObject", "uid"), ""))
    uid = str(lookup(item, ("metadata", "uid"), ""))
    same = not said or not uid or said == uid
    return same and lookup(event, ("involvedObject", "name")) == name_of(item)


def newest_first(events: Sequence[Object]) -> list[Object]:
    return sorted(events, key=event_time, reverse=True)


def event_time(event: Object) -> str:
    """The event's time in ISO format, which sorts as text."""
    return str(
        event.get("lastTimestamp")
        or event.get("eventTime")
        or lookup(event, ("metadata", "creationTimestamp"))
        or ""
    )
