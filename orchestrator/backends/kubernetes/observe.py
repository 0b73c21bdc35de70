"""What Kubernetes says of a job, its pods and their events, in words to act on. Pure."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from orchestrator.backends.kubernetes.render import names
from orchestrator.backends.kubernetes.resources import JobKind, Object, lookup, name_of
from orchestrator.contract.launch import Cause

LABEL = names.JOB_LABEL
LAUNCH = names.LAUNCH_ANNOTATION
CANCELLED = names.CANCELLED_ANNOTATION
QUEUE = names.QUEUE_LABEL

Meaning = Literal["missing", "suspended", "waiting", "running", "succeeded", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """Why something does not run."""

    what: str
    """In one word, Kubernetes' own where it has one."""
    why: str
    advice: str = ""
    pod: str = ""

    def __str__(self) -> str:
        where = f"pod {self.pod}: " if self.pod else ""
        why = f": {self.why}" if self.why else ""
        advice = f"; {self.advice}" if self.advice else ""
        return f"{where}{self.what}{why}{advice}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """A job as Kubernetes has it."""

    name: str
    """As `kubectl get` takes it, with the namespace."""
    meaning: Meaning
    launch: int | None
    pods: int = 0
    running: int = 0
    hosts: int = 0
    """Pods that it is to have."""
    troubles: tuple[Trouble, ...] = ()
    """The gravest first."""
    reason: str = ""
    """What the operator says."""
    cancelled_by: str = ""
    queue: str = ""
    """Of Kueue."""

    @property
    def is_over(self) -> bool:
        """No pod is there, and none will be unless somebody asks for it."""
        return self.pods == 0 and (
            self.meaning in ("missing", "succeeded", "failed") or bool(self.cancelled_by)
        )

    @property
    def words(self) -> str:
        """In one line."""
        match self.meaning:
            case "missing":
                return f"{self.name} does not exist (any more)"
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
    def _count(self) -> str:
        if not self.pods:
            return "it has no pod yet"
        return f"{self.running} of {max(self.pods, self.hosts)} pods run"

    @property
    def _first(self) -> str:
        if not self.troubles:
            return ""
        more = len({one.pod for one in self.troubles}) - 1
        others = f" (and {more} more pods in trouble)" if more > 0 else ""
        return f"; {self.troubles[0]}{others}"


def observe(
    kind: JobKind,
    name: str,
    job: Object | None,
    pods: Sequence[Object] = (),
    events: Sequence[Object] = (),
    hosts: int = 0,
) -> Observed:
    """`pods` and `events` may be of other jobs as well; `hosts`: how many pods the job is to have.
    None: there is no such job."""
    if job is None:
        mine = [pod for pod in pods if lookup(pod, ("metadata", "labels", LABEL)) == _bare(name)]
        return Observed(name=name, meaning="missing", launch=None, pods=len(alive(mine)))
    mine = pods_of(job, pods)
    there = alive(mine)
    running = [pod for pod in there if is_running(pod)]
    troubles = [trouble for pod in mine if (trouble := pod_trouble(pod, events)) is not None]
    troubles += _job_troubles(job, events, whole=bool(mine) and len(mine) >= hosts)
    meaning, reason = _standing(kind, job, bool(running))
    notes: Mapping[str, str] = lookup(job, ("metadata", "annotations"), {})
    return Observed(
        name=name,
        meaning=meaning,
        launch=launch_of(job),
        pods=len(there),
        running=len(running),
        hosts=hosts,
        troubles=tuple(sorted(troubles, key=_gravity)),
        reason=reason,
        cancelled_by=notes.get(CANCELLED, ""),
        queue=str(lookup(job, ("metadata", "labels", QUEUE), "")),
    )


def _bare(name: str) -> str:
    return name.rpartition("/")[2]


def launch_of(item: Object) -> int | None:
    """Which submission an object is of."""
    said = lookup(item, ("metadata", "annotations", LAUNCH), "")
    return int(said) if str(said).isdigit() else None


def pods_of(job: Object, pods: Sequence[Object]) -> list[Object]:
    name = name_of(job)
    return [pod for pod in pods if lookup(pod, ("metadata", "labels", LABEL)) == name]


def alive(pods: Sequence[Object]) -> list[Object]:
    """That may still have processes."""
    return [pod for pod in pods if phase_of(pod) not in ("Succeeded", "Failed")]


def phase_of(pod: Object) -> str:
    return str(lookup(pod, ("status", "phase"), "Pending"))


def is_running(pod: Object) -> bool:
    return phase_of(pod) == "Running" and not is_leaving(pod)


def is_leaving(pod: Object) -> bool:
    return lookup(pod, ("metadata", "deletionTimestamp")) is not None


def begun_at(pod: Object) -> float:
    """Unix seconds at which it, or the container that it has now, began."""
    states = lookup(pod, ("status", "containerStatuses"), ())
    starts = [lookup(one, ("state", "running", "startedAt")) for one in states]
    stamps = [lookup(pod, ("metadata", "creationTimestamp")), *starts]
    return max((seconds_of(one) for one in stamps if one), default=0.0)


def seconds_of(stamp: str) -> float:
    """Unix seconds of a time as Kubernetes writes it."""
    return datetime.fromisoformat(stamp).timestamp()


def node_of(pod: Object) -> str:
    return str(lookup(pod, ("spec", "nodeName"), ""))


def has_ended(job: Object) -> bool:
    return any(name in _conditions(job) for name in OVER)


# The job itself

OVER: Mapping[str, Meaning] = {
    "Succeeded": "succeeded",
    "Completed": "succeeded",
    "Complete": "succeeded",
    "Failed": "failed",
}
"""Condition of a PyTorchJob, a JobSet or a TrainJob -> what it means."""


def _standing(kind: JobKind, job: Object, running: bool) -> tuple[Meaning, str]:
    conditions = _conditions(job)
    for name, meaning in OVER.items():
        if name in conditions:
            return meaning, _said(conditions[name])
    if lookup(job, kind.suspend) is True or ("Suspended" in conditions and not running):
        return "suspended", _said(conditions.get("Suspended", {}))
    if running:
        return "running", _said(conditions.get("Restarting", {}))
    return "waiting", _said(conditions.get("Restarting", {}))


def _conditions(item: Object) -> Mapping[str, Object]:
    """Those that hold."""
    found = lookup(item, ("status", "conditions"), ())
    return {str(one.get("type")): one for one in found if one.get("status") == "True"}


def _said(condition: Object) -> str:
    return one_line(str(condition.get("message") or condition.get("reason") or ""))


def one_line(text: str) -> str:
    return " ".join(text.split())


def _job_troubles(job: Object, events: Sequence[Object], *, whole: bool) -> Iterator[Trouble]:
    """Of pods that never came to be, and of what holds a queued job back. `whole`: it has all."""
    name = name_of(job)
    for event in _newest(events):
        about: Object = event.get("involvedObject", {})
        message = one_line(str(event.get("message", "")))
        about_name = str(about.get("name", ""))
        if about.get("kind") == "Workload" and f"-{name}-" in f"-{about_name}-":
            if event.get("reason") in ("Pending", "QuotaReserved", "EvictedDueToPreempted"):
                yield Trouble(what="Kueue", why=message)
        elif whole or event.get("reason") not in ("FailedCreate", "FailedCreatePod"):
            continue
        elif about_name == name or about_name.startswith(f"{name}-"):
            yield creation_trouble(message)


def creation_trouble(message: str) -> Trouble:
    """Why an operator could not make a pod, of its event."""
    if "exceeded quota" in message:
        return Trouble(
            what="quota exceeded",
            why=message,
            advice="`kubectl describe resourcequota` shows what is used",
        )
    if "PodSecurity" in message:
        return Trouble(
            what="admission refused",
            why=message,
            advice="the namespace's pod security level forbids it: ask for a namespace that allows"
            " it, or leave out what it names (host_network, host paths)",
        )
    if "denied the request" in message or "is forbidden" in message:
        return Trouble(what="admission refused", why=message)
    return Trouble(what="no pod can be made", why=message)


def _newest(events: Sequence[Object]) -> list[Object]:
    return sorted(events, key=event_time, reverse=True)


def event_time(event: Object) -> str:
    """ISO, as it sorts."""
    return str(
        event.get("lastTimestamp")
        or event.get("eventTime")
        or lookup(event, ("metadata", "creationTimestamp"))
        or ""
    )


# A pod

WAITING: Mapping[str, str] = {
    "ImagePullBackOff": "is cluster.kubernetes.image right, and may the cluster pull it"
    " (image_pull_secrets)?",
    "ErrImagePull": "is cluster.kubernetes.image right, and may the cluster pull it"
    " (image_pull_secrets)?",
    "InvalidImageName": "write cluster.kubernetes.image as REGISTRY/NAME:TAG",
    "ErrImageNeverPull": "the image is not on the node, and image_pull_policy is Never",
    "CreateContainerConfigError": "a Secret or ConfigMap that the pod names is missing",
    "CreateContainerError": "the container runtime refuses the container",
    "RunContainerError": "the command cannot be run: is cluster.kubernetes.python in the image?",
    "CrashLoopBackOff": "`kubectl logs --previous` shows how it ended",
}
"""Why a container waits -> what there is to do about it."""

DISRUPTED: Mapping[str, tuple[str, str]] = {
    "PreemptionByScheduler": ("Preempted", "a job of higher priority needs its place"),
    "PreemptionByKubeScheduler": ("Preempted", "a job of higher priority needs its place"),
    "DeletionByTaintManager": ("node lost", "its node does not answer, or has a new taint"),
    "EvictionByEvictionAPI": ("Evicted", "its node is being drained"),
    "DeletionByPodGC": ("node lost", "its node is gone"),
    "TerminationByKubelet": ("Evicted", "its node is short of something, or shuts down"),
}
"""Reason of a pod's condition DisruptionTarget -> in a word, and why."""

LEFT: Mapping[str, tuple[str, str]] = {
    "Evicted": ("Evicted", ""),
    "Preempting": ("Preempted", ""),
    "NodeLost": ("node lost", ""),
    "Shutdown": ("Evicted", "its node shuts down"),
    "Terminated": ("Evicted", "its node shuts down"),
    "NodeShutdown": ("Evicted", "its node shuts down"),
    "NodeAffinity": ("Evicted", "its node's labels do not fit it any more"),
    "UnexpectedAdmissionError": ("refused by the node", ""),
    "DeadlineExceeded": ("DeadlineExceeded", ""),
}
"""A failed pod's reason -> in a word, and why where it does not say."""

SCHEDULING: Sequence[tuple[str, str]] = (
    ("unbound immediate", "the PersistentVolumeClaim is not bound: `kubectl get pvc`"),
    ("persistentvolumeclaim", "make the PersistentVolumeClaim, or name another one"),
    ("pod affinity rules", "too few nodes are free that are as near to each other as is asked"),
    ("anti-affinity", "each host needs a node of its own, and too few are free"),
    ("Insufficient", "too few nodes have that free: wait, ask for less, or for fewer hosts"),
    ("affinity/selector", "nodes with the wanted labels are too few, or left out by ndctl"),
    ("node selector", "nodes with the labels of cluster.kubernetes.node_selector are too few"),
    ("taint", "nodes are tainted: wait, or set cluster.kubernetes.tolerations"),
    ("unschedulable", "nodes are cordoned: wait, or `kubectl uncordon` them"),
)
"""What the scheduler's message has in it -> what there is to do about it; the first that fits."""


def pod_trouble(pod: Object, events: Sequence[Object] = ()) -> Trouble | None:
    """Why a pod does not run, or did not go on; None when all is well with it."""
    name, status = name_of(pod), lookup(pod, ("status",), {})
    conditions = {str(one.get("type")): one for one in status.get("conditions") or ()}
    target = conditions.get("DisruptionTarget", {})
    if target.get("status") == "True":
        what, why = DISRUPTED.get(str(target.get("reason")), (str(target.get("reason")), ""))
        said = one_line(str(target.get("message", "")))
        return Trouble(pod=name, what=what, why=f"{why} ({said})" if why and said else why or said)
    if phase_of(pod) == "Failed" and status.get("reason"):
        reason = str(status["reason"])
        what, why = LEFT.get(reason, (reason, ""))
        return Trouble(pod=name, what=what, why=one_line(str(status.get("message") or why)))
    scheduled = conditions.get("PodScheduled", {})
    if scheduled.get("status") == "False":
        return _unscheduled(name, str(scheduled.get("reason")), _said(scheduled))
    return _container_trouble(name, status, events)


def _unscheduled(pod: str, reason: str, message: str) -> Trouble:
    advice = next((advice for part, advice in SCHEDULING if part in message), "")
    if reason == "SchedulingGated":
        return Trouble(pod=pod, what=reason, why=message, advice="Kueue has not placed it yet")
    lacking = sorted(set(re.findall(r"Insufficient ([\w./-]+\w)", message)))
    what = reason + (f" (too little {', '.join(lacking)})" if lacking else "")
    return Trouble(pod=pod, what=what, why=message, advice=advice)


def _container_trouble(pod: str, status: Object, events: Sequence[Object]) -> Trouble | None:
    every = [
        *(status.get("initContainerStatuses") or ()),
        *(status.get("containerStatuses") or ()),
    ]
    for container in every:
        ended = lookup(container, ("state", "terminated"), {})
        before = lookup(container, ("lastState", "terminated"), {})
        if "OOMKilled" in (ended.get("reason"), before.get("reason")):
            return Trouble(
                pod=pod,
                what="OOMKilled",
                why="it took more memory than its limit",
                advice="ask for more with cluster.kubernetes.memory; /dev/shm counts as well",
            )
        waiting = lookup(container, ("state", "waiting"), {})
        reason = str(waiting.get("reason", ""))
        if reason in WAITING:
            said = _image_said(pod, events) if "Pull" in reason else ""
            message = said or one_line(str(waiting.get("message", ""))) or _ended(before)
            return Trouble(pod=pod, what=reason, why=message, advice=WAITING[reason])
        if reason in ("ContainerCreating", "PodInitializing"):
            return _mounting(pod, events)
        if ended.get("exitCode"):
            return Trouble(pod=pod, what="Error", why=_ended(ended))
    return None


def _ended(terminated: Object) -> str:
    code = terminated.get("exitCode")
    message = _last_words(str(terminated.get("message") or ""))
    return ": ".join(filter(None, (f"exit code {code}" if code is not None else "", message)))


def _last_words(log: str) -> str:
    """What a pod of ours died of, of the end of its log; of others the last line."""
    _, found, said = log.rpartition(" CRITICAL ")
    lines = [line for line in log.splitlines() if line.strip() and not line.startswith("ndctl-")]
    return one_line(said) if found else one_line(lines[-1]) if lines else ""


def _image_said(pod: str, events: Sequence[Object]) -> str:
    """The registry's own words; the status may only say that the kubelet waits to try again."""
    for event in _about(pod, events):
        if event.get("reason") == "Failed" and "Error: " not in str(event.get("message")):
            return one_line(str(event.get("message")))
    return ""


def _mounting(pod: str, events: Sequence[Object]) -> Trouble | None:
    for event in _about(pod, events):
        reason = str(event.get("reason"))
        if reason in ("FailedMount", "FailedAttachVolume", "FailedCreatePodSandBox"):
            advice = "" if "Sandbox" in reason else "look at cluster.kubernetes.runs and volumes"
            return Trouble(
                pod=pod, what=reason, why=one_line(str(event.get("message"))), advice=advice
            )
    return None


def _about(pod: str, events: Sequence[Object]) -> list[Object]:
    return [one for one in _newest(events) if lookup(one, ("involvedObject", "name")) == pod]


GRAVE = ("quota", "admission", "no pod", "ErrImage", "ImagePull", "InvalidImage", "Create", "Run")


def _gravity(trouble: Trouble) -> tuple[int, str]:
    """What will not mend by itself comes first."""
    grave = trouble.what.startswith(GRAVE)
    return (0 if grave else 1, trouble.pod)


TAKEN = ("Evicted", "Preempted")
"""What no pod can do anything about; that a node is lost may be the job's own fault."""


def taken(
    job: str, host: str, pods: Sequence[Object], events: Sequence[Object], since: float
) -> str:
    """Why Kubernetes itself ended the pod of `job` on `host` after `since`; empty: it did not."""
    there = [pod for pod in pods if node_of(pod) == host]
    newest = max(there, key=begun_at, default={})
    trouble = pod_trouble(newest) if newest else None
    if trouble is not None and trouble.what in TAKEN and phase_of(newest) == "Failed":
        return f"{trouble.what}: {trouble.why}" if trouble.why else trouble.what
    for event in _newest(events):
        at, name = event_time(event), str(lookup(event, ("involvedObject", "name"), ""))
        node = lookup(event, ("source", "host")) or event.get("reportingInstance")
        theirs = name.startswith(f"{job}-") and node == host and event.get("reason") == "Evicted"
        if theirs and at and seconds_of(at) >= since:
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
    conditions = _conditions(pod or {})
    what, _ = DISRUPTED.get(str(conditions.get("DisruptionTarget", {}).get("reason")), ("", ""))
    if what:
        return "preempted" if what == "Preempted" else "drained"
    return "requeued" if pod is None or is_leaving(pod) else "unknown"
