"""Computes the state of a job from its Kubernetes objects, with advice. Pure."""

from collections.abc import Mapping, Sequence
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from orchestrator.backends.kubernetes.node_affinity import not_kept_off
from orchestrator.backends.kubernetes.observe.object_fields import (
    CANCELLED,
    LABEL,
    QUEUE,
    alive,
    begun_at,
    conditions_of,
    deleted_at,
    event_time,
    is_leaving,
    is_running,
    launch_of,
    leads,
    newest_first,
    node_of,
    one_line,
    phase_of,
    pods_of,
    said_of,
    seconds_of,
)
from orchestrator.backends.kubernetes.observe.pending_reasons import (
    DISRUPTED,
    PendingReason,
    gravity,
    job_troubles,
    pod_problem,
    wrong_number_of_pods,
)
from orchestrator.backends.kubernetes.render.names import (
    AVOID_ANNOTATION,
    EXCLUDED_ANNOTATION,
    HASH_ANNOTATION,
    RUNS_ANNOTATION,
    is_pod_of,
)
from orchestrator.backends.kubernetes.resources import JobKind, Object, lookup, name_of
from orchestrator.contract.launch import Cause
from orchestrator.contract.messages.actions import Ending
from orchestrator.contract.spec.kubernetes_spec import Kind

Meaning = Literal["missing", "leaving", "suspended", "waiting", "running", "succeeded", "failed"]


class Observed(Struct, frozen=True, kw_only=True):
    """A job as observed in Kubernetes."""

    name: str
    """Kind, namespace and name, such as `PyTorchJob ns/job`."""
    meaning: Meaning
    launch: int | None
    pods: int = 0
    running: int = 0
    hosts: int = 0
    """Number of pods that the job should have."""
    troubles: tuple[PendingReason, ...] = ()
    """The most severe first."""
    reason: str = ""
    """The operator's message."""
    cancelled_by: str = ""
    queue: str = ""
    """Name of its Kueue queue."""
    leader_runs: bool = False
    """Whether the leader's pod runs."""
    deleted_at: float | None = None
    """When the job was deleted, estimated from its remaining pods; None: unknown."""
    with_namespace: bool = False
    """Whether it was deleted with its namespace."""

    @property
    def is_over(self) -> bool:
        """No pod exists, and none will be created without a request."""
        return self.pods == 0 and self.ending is not None

    @property
    def ending(self) -> Ending | None:
        """How it ended; None while pods may still be created."""
        match self.meaning:
            case "missing" | "leaving":
                return "CANCELLED"
            case "succeeded":
                return "SUCCEEDED"
            case "failed":
                return "FAILED"
        return "CANCELLED" if self.cancelled_by else None

    @property
    def needs_fix(self) -> bool:
        """Whether no pods are created until someone corrects the spec."""
        return self.meaning == "waiting" and any(one.needs_fix for one in self.troubles[:1])

    @property
    def words(self) -> str:
        """The state in one line."""
        match self.meaning:
            case "missing" | "leaving":
                return f"{self._deleted}{self._left}"
            case "succeeded":
                return f"{self.name} has ended (Succeeded)"
            case "failed":
                said = f": {self.reason}" if self.reason else ""
                return f"{self.name} has Failed{said}{self._first}"
            case "suspended" if self.cancelled_by:
                return f"{self.name} is suspended: cancelled by {self.cancelled_by}"
            case "suspended" if self.queue:
                return f"{self.name} waits in Kueue's queue {self.queue}, suspended{self._first}"
            case "suspended":
                return f"{self.name} is suspended{self._first}"
            case "waiting":
                return f"{self.name} waits, {self._count}{self._first}"
            case "running":
                return f"{self.name}: {self._count}{self._first}"

    @property
    def _deleted(self) -> str:
        if self.with_namespace:
            namespace = self.name.partition(" ")[2].partition("/")[0]
            return f"namespace {namespace} was deleted, and {self.name} with it"
        verb = "is being" if self.meaning == "leaving" else "was"
        return f"{self.name} {verb} deleted (unknown who deleted it)"

    @property
    def _left(self) -> str:
        if not self.pods:
            return ""
        pods = "1 pod" if self.pods == 1 else f"{self.pods} pods"
        return f"; {pods} may still write a checkpoint"

    @property
    def _count(self) -> str:
        if not self.pods:
            return "no pod exists yet"
        return f"{self.running} of {max(self.pods, self.hosts)} pods run"

    @property
    def _first(self) -> str:
        if not self.troubles:
            return ""
        more = len({one.pod for one in self.troubles}) - 1
        others = f" (and {more} more pods with problems)" if more > 0 else ""
        return f"; {self.troubles[0]}{others}"


def observe(
    kind: JobKind,
    name: str,
    job: Object | None,
    pods: Sequence[Object] = (),
    events: Sequence[Object] = (),
    hosts: int = 0,
) -> Observed:
    """The state of `job`; None: the job object does not exist.

    Args:
        pods, events: may belong to other jobs too.
        hosts: number of pods that the job should have.
    """
    if job is None:
        mine = [pod for pod in pods if lookup(pod, ("metadata", "labels", LABEL)) == _bare(name)]
        gone_at = max(filter(None, map(deleted_at, mine)), default=None)
        left = len(alive(mine))
        return Observed(name=name, meaning="missing", launch=None, pods=left, deleted_at=gone_at)
    mine = pods_of(job, pods)
    there = alive(mine)
    running = [pod for pod in there if is_running(pod)]
    troubles = [trouble for pod in mine if (trouble := pod_problem(pod, events)) is not None]
    troubles += job_troubles(kind, job, events, whole=bool(mine) and len(mine) >= hosts)
    if not has_ended(job):
        troubles += wrong_number_of_pods(kind, job, hosts)
    meaning, reason = _standing(kind, job, bool(running))
    if is_leaving(job) and not has_ended(job):
        meaning = "leaving"  # finalizers delay the deletion, but no pod will be created
    notes: Mapping[str, str] = lookup(job, ("metadata", "annotations"), {})
    return Observed(
        name=name,
        meaning=meaning,
        launch=launch_of(job),
        pods=len(there),
        running=len(running),
        hosts=hosts,
        troubles=tuple(sorted(troubles, key=gravity)),
        reason=reason,
        cancelled_by=notes.get(CANCELLED, ""),
        queue=str(lookup(job, ("metadata", "labels", QUEUE), "")),
        leader_runs=any(leads(pod) for pod in running),
        deleted_at=deleted_at(job),
    )


def with_notes(seen: Observed, job: Object, asked: Mapping[str, str]) -> Observed:
    """Adds problems that the notes of the job's pods show: `asked` has their ConfigMap's
    annotations."""
    if has_ended(job):
        return seen
    more = (*_not_what_runs(job, asked), *_not_kept_off(job, asked))
    return replace(seen, troubles=tuple(sorted((*seen.troubles, *more), key=gravity)))


def _not_what_runs(job: Object, asked: Mapping[str, str]) -> list[PendingReason]:
    """The same launch was applied again with different content. Recreated pods ignore it, and
    continue with the original launch."""
    notes: Mapping[str, str] = lookup(job, ("metadata", "annotations"), {})
    runs, applied = asked.get(RUNS_ANNOTATION), notes.get(HASH_ANNOTATION)
    if runs is None or runs == applied:
        return []
    why = (
        f"the objects applied last differ from launch {launch_of(job)}, which keeps running"
        " unchanged"
    )
    name = name_of(job)
    advice = f"`ndctl cancel {name}`, then `ndctl submit SPEC --resume` runs it"
    return [PendingReason(what="applied objects not in use", why=why, advice=advice)]


def _not_kept_off(job: Object, asked: Mapping[str, str]) -> list[PendingReason]:
    """The job excludes nodes, but no controller keeps new pods off them."""
    wanted = dict.fromkeys(filter(None, asked.get(AVOID_ANNOTATION, "").split(",")))
    notes: Mapping[str, str] = lookup(job, ("metadata", "annotations"), {})
    done = notes.get(EXCLUDED_ANNOTATION, "").split(",")
    if not (left := [host for host in wanted if host not in done]):
        return []
    why = f"new pods may be scheduled to {', '.join(left)}, which the job excludes"
    return [PendingReason(what="no controller", why=why, advice=not_kept_off(left))]


def _bare(name: str) -> str:
    return name.rpartition("/")[2]


OVER: Mapping[str, Meaning] = {
    "Succeeded": "succeeded",
    "Completed": "succeeded",
    "Complete": "succeeded",
    "Failed": "failed",
}
"""Condition of a PyTorchJob, a JobSet or a TrainJob -> what it means."""


def _standing(kind: JobKind, job: Object, running: bool) -> tuple[Meaning, str]:
    conditions = conditions_of(job)
    for name, meaning in OVER.items():
        if name in conditions:
            return meaning, said_of(conditions[name])
    if lookup(job, kind.suspend) is True or ("Suspended" in conditions and not running):
        return "suspended", said_of(conditions.get("Suspended", {}))
    if running:
        return "running", said_of(conditions.get("Restarting", {}))
    return "waiting", said_of(conditions.get("Restarting", {}))


def has_ended(job: Object) -> bool:
    return any(name in conditions_of(job) for name in OVER)


TAKEN = ("Evicted", "Preempted")
"""Reasons that are never caused by the job itself. A lost node may be its fault."""


def taken(
    kind: Kind, job: str, host: str, pods: Sequence[Object], events: Sequence[Object], since: float
) -> str:
    """Why Kubernetes itself ended the pod of `job` on `host` after `since`; empty: it did not."""
    there = [pod for pod in pods if node_of(pod) == host]
    newest = max(there, key=begun_at, default={})
    trouble = pod_problem(newest) if newest else None
    if trouble is not None and trouble.what in TAKEN and phase_of(newest) == "Failed":
        return f"{trouble.what}: {trouble.why}" if trouble.why else trouble.what
    for event in newest_first(events):
        at, name = event_time(event), str(lookup(event, ("involvedObject", "name"), ""))
        node = lookup(event, ("source", "host")) or event.get("reportingInstance")
        mine = is_pod_of(kind, job, name) and node == host and event.get("reason") == "Evicted"
        if mine and at and seconds_of(at) >= since:
            return f"Evicted: {one_line(str(event.get('message', '')))}"
    return ""


def cause(kind: JobKind, job: Object | None, pod: Object | None, launch: int) -> Cause:
    """Why the leader's `pod` is being ended."""
    if job is None or is_leaving(job) or launch_of(job) not in (None, launch):
        return "cancelled"
    if lookup(job, ("metadata", "annotations", CANCELLED)):
        return "cancelled"
    if lookup(job, kind.suspend) is True:
        return "preempted" if lookup(job, ("metadata", "labels", QUEUE)) else "requeued"
    conditions = conditions_of(pod or {})
    what, _ = DISRUPTED.get(str(conditions.get("DisruptionTarget", {}).get("reason")), ("", ""))
    if what:
        return "preempted" if what == "Preempted" else "drained"
    return "requeued" if pod is None or is_leaving(pod) else "unknown"
