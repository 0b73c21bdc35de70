"""Why something of a job does not run, and what there is to do about it. Pure."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from orchestrator.backends.kubernetes.finalizers import by_force
from orchestrator.backends.kubernetes.observe.object_fields import (
    event_time,
    is_about,
    newest_first,
    node_of,
    one_line,
    phase_of,
    said_of,
    seconds_of,
)
from orchestrator.backends.kubernetes.render.names import NODE
from orchestrator.backends.kubernetes.resources import JobKind, Object, lookup, name_of


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
    "NodeLost": ("node lost", "its node does not answer"),
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
        preempted = _said(name, events, "Preempted")
        before = f"; the pod before it was preempted: {preempted}" if preempted else ""
        return _unscheduled(name, str(scheduled.get("reason")), said_of(scheduled) + before)
    about = [one for one in newest_first(events) if is_about(one, pod)]
    return _container_trouble(name, status, about) or _leaving(pod)


def _leaving(pod: Object) -> Trouble | None:
    """Where its node is heard it goes soon; else it stays so, for ever."""
    until = lookup(pod, ("metadata", "deletionTimestamp"))
    if until is None:
        return None
    return Trouble(
        pod=name_of(pod),
        what="Terminating",
        why=f"{node_of(pod)} is to have ended it by {until}",
        advice=f"where that node does not answer any more, and ndctl may not: `{by_force(pod)}`",
    )


def _said(pod: str, events: Sequence[Object], reason: str) -> str:
    """Of whatever pod of that name."""
    named = (e for e in newest_first(events) if lookup(e, ("involvedObject", "name")) == pod)
    about = (one for one in named if one.get("reason") == reason)
    return next((one_line(str(one.get("message"))) for one in about), "")


def _unscheduled(pod: str, reason: str, message: str) -> Trouble:
    advice = next((advice for part, advice in SCHEDULING if part in message), "")
    if reason == "SchedulingGated":
        return Trouble(pod=pod, what=reason, why=message, advice="Kueue has not placed it yet")
    lacking = sorted(set(re.findall(r"Insufficient ([\w./-]+\w)", message)))
    what = reason + (f" (too little {', '.join(lacking)})" if lacking else "")
    return Trouble(pod=pod, what=what, why=message, advice=advice)


def _container_trouble(pod: str, status: Object, events: Sequence[Object]) -> Trouble | None:
    """`events`: about this pod, the newest first."""
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
    for event in events:
        if event.get("reason") == "Failed" and "Error: " not in str(event.get("message")):
            return one_line(str(event.get("message")))
    return ""


UNMADE = ("FailedMount", "FailedAttachVolume", "FailedCreatePodSandBox")
"""Reasons for which a kubelet does not come as far as the image."""
COMES_ON = ("Pulling", "Pulled", "Created", "Started")
"""What it says once all volumes are mounted, and the pod has its network."""


def _mounting(pod: str, events: Sequence[Object]) -> Trouble | None:
    """What it failed at once and then managed keeps nothing from beginning."""
    failed = next((one for one in events if one.get("reason") in UNMADE), None)
    went_on = next((event_time(one) for one in events if one.get("reason") in COMES_ON), "")
    if failed is None or event_time(failed) <= went_on:
        return None
    reason = str(failed["reason"])
    advice = "" if "Sandbox" in reason else "look at cluster.kubernetes.runs and volumes"
    return Trouble(pod=pod, what=reason, why=one_line(str(failed.get("message"))), advice=advice)


def job_troubles(
    kind: JobKind, job: Object, events: Sequence[Object], *, whole: bool
) -> Iterator[Trouble]:
    """Of pods that never came to be, and of what holds a queued job back. `whole`: it has all."""
    for event in newest_first(events):
        reason, message = event.get("reason"), one_line(str(event.get("message", "")))
        if not _concerns(event, kind, job):
            continue
        if lookup(event, ("involvedObject", "kind")) == WORKLOAD:
            if reason in ("Pending", "QuotaReserved", "EvictedDueToPreempted"):
                yield Trouble(what="Kueue", why=message)
        elif not whole and reason in ("FailedCreate", "FailedCreatePod"):
            yield creation_trouble(message)


WORKLOAD = "Workload"
CLOCKS_S = 3.0
"""By which the times of controllers and the API server may be off."""


def _concerns(event: Object, kind: JobKind, job: Object) -> bool:
    """Whether it is about `job` or what its operator and Kueue made of it: of these no uid is
    known, but they are younger than the job."""
    about: Object = event.get("involvedObject", {})
    what, name, called = str(about.get("kind", "")), name_of(job), str(about.get("name", ""))
    if what == kind.resource.kind:
        return is_about(event, job)
    made, at = lookup(job, ("metadata", "creationTimestamp")), event_time(event)
    if made and at and seconds_of(at) < seconds_of(made) - CLOCKS_S:
        return False
    if what == WORKLOAD:
        owner = f"{kind.resource.kind.lower()}-{name}"
        return re.fullmatch(rf"{re.escape(owner)}-[a-z0-9]+", called) is not None
    return called in (name, f"{name}-{NODE}-0")


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


GRAVE = ("quota", "admission", "no pod", "ErrImage", "ImagePull", "InvalidImage", "Create", "Run")


def gravity(trouble: Trouble) -> tuple[int, str]:
    """What will not mend by itself comes first."""
    grave = trouble.what.startswith(GRAVE)
    return (0 if grave else 1, trouble.pod)
