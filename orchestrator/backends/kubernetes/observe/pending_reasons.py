"""Why a pod or job does not run, and what to do about it. Pure."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence

from msgspec import Struct

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
from orchestrator.inventory.kubernetes.selectors import requirements


class PendingReason(Struct, frozen=True, kw_only=True):
    """Why something does not run."""

    what: str
    """One word; Kubernetes' own if it has one."""
    why: str
    advice: str = ""
    pod: str = ""
    needs_fix: bool = False
    """Whether it stays like this until someone corrects the spec or the rules of the namespace."""

    def __str__(self) -> str:
        where = f"pod {self.pod}: " if self.pod else ""
        why = f": {self.why}" if self.why else ""
        advice = f"; {self.advice}" if self.advice else ""
        return f"{where}{self.what}{why}{advice}"


WAITING: Mapping[str, str] = {
    "ImagePullBackOff": "check cluster.kubernetes.image and whether the cluster may pull it"
    " (image_pull_secrets)",
    "ErrImagePull": "check cluster.kubernetes.image and whether the cluster may pull it"
    " (image_pull_secrets)",
    "InvalidImageName": "write cluster.kubernetes.image as REGISTRY/NAME:TAG",
    "ErrImageNeverPull": "image_pull_policy is Never and the image is not on the node",
    "CreateContainerConfigError": "a Secret or ConfigMap that the pod references is missing",
    "CreateContainerError": "the container runtime rejected the container",
    "RunContainerError": "the command cannot run: is cluster.kubernetes.python in the image?",
    "CrashLoopBackOff": "`kubectl logs --previous` shows how it ended",
}
"""Waiting reason of a container -> advice."""

DISRUPTED: Mapping[str, tuple[str, str]] = {
    "PreemptionByScheduler": ("Preempted", "preempted for a job of higher priority"),
    "PreemptionByKubeScheduler": ("Preempted", "preempted for a job of higher priority"),
    "DeletionByTaintManager": ("node lost", "its node is unreachable or has a new taint"),
    "EvictionByEvictionAPI": ("Evicted", "its node is being drained"),
    "DeletionByPodGC": ("node lost", "its node was deleted"),
    "NodeLost": ("node lost", "its node is unreachable"),
    "TerminationByKubelet": ("Evicted", "its node is low on a resource or shuts down"),
}
"""Reason of the pod condition DisruptionTarget -> one word, and why."""

LEFT: Mapping[str, tuple[str, str]] = {
    "Evicted": ("Evicted", ""),
    "Preempting": ("Preempted", ""),
    "NodeLost": ("node lost", ""),
    "Shutdown": ("Evicted", "its node shuts down"),
    "Terminated": ("Evicted", "its node shuts down"),
    "NodeShutdown": ("Evicted", "its node shuts down"),
    "NodeAffinity": ("Evicted", "its node's labels no longer match"),
    "UnexpectedAdmissionError": ("refused by the node", ""),
    "DeadlineExceeded": ("DeadlineExceeded", ""),
}
"""Reason of a failed pod -> one word, and why if it has no message."""

OTHER_PODS = "pod affinity rules"
"""In the scheduler's message, if a required pod affinity excludes nodes."""
SCHEDULING: Sequence[tuple[str, str]] = (
    ("unbound immediate", "the PersistentVolumeClaim is not bound: `kubectl get pvc`"),
    ("persistentvolumeclaim", "create the PersistentVolumeClaim, or use another one"),
    (OTHER_PODS, "too few free nodes in one topology domain"),
    ("anti-affinity", "each host needs its own node, and too few are free"),
    ("Insufficient", "too few nodes have that much free: wait, or request less or fewer hosts"),
    ("affinity/selector", "too few nodes have the required labels and are not excluded by ndctl"),
    ("node selector", "too few nodes have the labels of cluster.kubernetes.node_selector"),
    ("taint", "nodes are tainted: wait, or set cluster.kubernetes.tolerations"),
    ("unschedulable", "nodes are cordoned: wait, or `kubectl uncordon` them"),
)
"""Text in the scheduler's message -> advice. The first match counts."""


def pod_problem(pod: Object, events: Sequence[Object] = ()) -> PendingReason | None:
    """Why a pod does not run or stopped; None for a healthy pod."""
    name, status = name_of(pod), lookup(pod, ("status",), {})
    conditions = {str(one.get("type")): one for one in status.get("conditions") or ()}
    target = conditions.get("DisruptionTarget", {})
    if target.get("status") == "True":
        what, why = DISRUPTED.get(str(target.get("reason")), (str(target.get("reason")), ""))
        said = one_line(str(target.get("message", "")))
        return PendingReason(
            pod=name, what=what, why=f"{why} ({said})" if why and said else why or said
        )
    if phase_of(pod) == "Failed" and status.get("reason"):
        reason = str(status["reason"])
        what, why = LEFT.get(reason, (reason, ""))
        return PendingReason(pod=name, what=what, why=one_line(str(status.get("message") or why)))
    scheduled = conditions.get("PodScheduled", {})
    if scheduled.get("status") == "False":
        preempted = _said(name, events, "Preempted")
        before = f"; its previous pod was preempted: {preempted}" if preempted else ""
        return _unscheduled(pod, str(scheduled.get("reason")), said_of(scheduled) + before)
    about = [one for one in newest_first(events) if is_about(one, pod)]
    return _container_problem(name, status, about) or _leaving(pod)


def _leaving(pod: Object) -> PendingReason | None:
    """A reachable node ends the pod soon; an unreachable one never does."""
    until = lookup(pod, ("metadata", "deletionTimestamp"))
    if until is None:
        return None
    return PendingReason(
        pod=name_of(pod),
        what="Terminating",
        why=f"{node_of(pod)} should end it by {until}",
        advice=f"if the node stays unreachable and ndctl may not delete it: `{by_force(pod)}`",
    )


def _said(pod: str, events: Sequence[Object], reason: str) -> str:
    """The event's message, for any pod with this name."""
    named = (e for e in newest_first(events) if lookup(e, ("involvedObject", "name")) == pod)
    about = (one for one in named if one.get("reason") == reason)
    return next((one_line(str(one.get("message"))) for one in about), "")


def _unscheduled(unplaced: Object, reason: str, message: str) -> PendingReason:
    pod = name_of(unplaced)
    advice = next((advice for part, advice in SCHEDULING if part in message), "")
    if reason == "SchedulingGated":
        return PendingReason(
            pod=pod, what=reason, why=message, advice="Kueue has not admitted it yet"
        )
    if OTHER_PODS in message and (asked := _of_other_pods(unplaced)):
        advice = (
            f"its affinity requires pods with {asked} nearby, and no fitting node has such: check"
            " podAffinity in cluster.kubernetes.pod_template"
        )
    lacking = sorted(set(re.findall(r"Insufficient ([\w./-]+\w)", message)))
    what = reason + (f" (insufficient {', '.join(lacking)})" if lacking else "")
    return PendingReason(pod=pod, what=what, why=message, advice=advice)


def _of_other_pods(pod: Object) -> str:
    """Labels that a required pod affinity asks for and the pod itself lacks. The scheduler admits
    the first pod of a group only if it meets its own affinity."""
    required = "requiredDuringSchedulingIgnoredDuringExecution"
    labels = lookup(pod, ("metadata", "labels"), {})
    return ", ".join(
        f"{one.key} {one.operator} {list(one.values)}"
        if one.values
        else f"{one.key} {one.operator}"
        for term in lookup(pod, ("spec", "affinity", "podAffinity", required), ())
        for one in requirements(term.get("labelSelector"))
        if not one.admits(labels)
    )


def _container_problem(pod: str, status: Object, events: Sequence[Object]) -> PendingReason | None:
    """`events`: about this pod, the newest first."""
    every = [*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())]
    for container in every:
        ended = lookup(container, ("state", "terminated"), {})
        before = lookup(container, ("lastState", "terminated"), {})
        if "OOMKilled" in (ended.get("reason"), before.get("reason")):
            return PendingReason(
                pod=pod,
                what="OOMKilled",
                why="it exceeded its memory limit",
                advice="raise cluster.kubernetes.memory; /dev/shm counts toward the limit",
            )
        waiting = lookup(container, ("state", "waiting"), {})
        reason = str(waiting.get("reason", ""))
        if reason in WAITING:
            said = _image_said(pod, events) if "Pull" in reason else ""
            message = said or one_line(str(waiting.get("message", ""))) or _ended(before)
            return PendingReason(pod=pod, what=reason, why=message, advice=WAITING[reason])
        if reason in ("ContainerCreating", "PodInitializing"):
            return _mounting(pod, events)
        if ended.get("exitCode"):
            return PendingReason(pod=pod, what="Error", why=_ended(ended))
    return None


def _ended(terminated: Object) -> str:
    code = terminated.get("exitCode")
    message = _last_words(str(terminated.get("message") or ""))
    return ": ".join(filter(None, (f"exit code {code}" if code is not None else "", message)))


def _last_words(log: str) -> str:
    """The CRITICAL message at the end of the agent's log; for other containers the last line."""
    _, found, said = log.rpartition(" CRITICAL ")
    lines = [line for line in log.splitlines() if line.strip() and not line.startswith("ndctl-")]
    return one_line(said) if found else one_line(lines[-1]) if lines else ""


def _image_said(pod: str, events: Sequence[Object]) -> str:
    """The registry's error; the pod status may only show the kubelet's back-off."""
    for event in events:
        if event.get("reason") == "Failed" and "Error: " not in str(event.get("message")):
            return one_line(str(event.get("message")))
    return ""


UNMADE = ("FailedMount", "FailedAttachVolume", "FailedCreatePodSandBox")
"""Event reasons of failures before the image pull."""
COMES_ON = ("Pulling", "Pulled", "Created", "Started")
"""Event reasons that show that volumes and network are ready."""


def _mounting(pod: str, events: Sequence[Object]) -> PendingReason | None:
    """An early failure that later succeeded does not block the pod."""
    failed = next((one for one in events if one.get("reason") in UNMADE), None)
    went_on = next((event_time(one) for one in events if one.get("reason") in COMES_ON), "")
    if failed is None or event_time(failed) <= went_on:
        return None
    reason = str(failed["reason"])
    advice = "" if "Sandbox" in reason else "check cluster.kubernetes.runs and volumes"
    return PendingReason(
        pod=pod, what=reason, why=one_line(str(failed.get("message"))), advice=advice
    )


def job_troubles(
    kind: JobKind, job: Object, events: Sequence[Object], *, whole: bool
) -> Iterator[PendingReason]:
    """Problems of pods that were never created, and of a job that waits in a queue. `whole`: all
    pods exist."""
    for event in newest_first(events):
        reason, message = event.get("reason"), one_line(str(event.get("message", "")))
        if not _concerns(event, kind, job):
            continue
        if lookup(event, ("involvedObject", "kind")) == WORKLOAD:
            if reason in ("Pending", "QuotaReserved", "EvictedDueToPreempted"):
                yield PendingReason(what="Kueue", why=message)
        elif not whole and reason in ("FailedCreate", "FailedCreatePod"):
            yield creation_trouble(VALUE.sub("", message))


WORKLOAD = "Workload"
VALUE = re.compile(r"Invalid value: \w+\.\w+\{.*?\}: ")
"""A value of an invalid field that is a Go struct, with addresses of memory."""
CLOCKS_S = 3.0
"""Clock difference between controllers and the API server."""


def _concerns(event: Object, kind: JobKind, job: Object) -> bool:
    """Whether an event is about `job`, or about objects that its operator and Kueue created for it.
    Their uids are unknown, but they are younger than the job."""
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


def creation_trouble(message: str) -> PendingReason:
    """Why an operator could not create a pod, from its event."""
    if "exceeded quota" in message:
        return PendingReason(
            what="quota exceeded",
            why=message,
            advice="`kubectl describe resourcequota` shows what is used",
        )
    if "PodSecurity" in message:
        return PendingReason(
            what="admission refused",
            why=message,
            advice="the namespace's pod security level forbids it: use a namespace that allows"
            " it, or remove what it names (host_network, host paths)",
            needs_fix=True,
        )
    # The account is created with the job, perhaps a moment after the first pod.
    if "error looking up service account" in message:
        return PendingReason(what="admission refused", why=message)
    if "denied the request" in message or "is forbidden" in message:
        return PendingReason(what="admission refused", why=message, needs_fix=True)
    if "is invalid:" in message:
        return PendingReason(what="invalid pods", why=message, needs_fix=True)
    return PendingReason(what="cannot create pods", why=message)


def wrong_number_of_pods(kind: JobKind, job: Object, hosts: int) -> Iterator[PendingReason]:
    """Whether somebody changed how many pods `job` asks for; `hosts`: what it should ask for. Of
    the kinds that ndctl creates, only a PyTorchJob can be changed so."""
    replicas: Mapping[str, Object] = lookup(job, ("spec", "pytorchReplicaSpecs"), {})
    asked = {role: int(one.get("replicas", 1)) for role, one in replicas.items()}
    pods = sum(asked.values())
    if not hosts or not replicas or pods == hosts:
        return
    # A PyTorchJob has one Master at most; null removes what somebody added to a job of one host.
    workers = {"replicas": hosts - 1} if hosts > 1 else None
    patch = {"spec": {"pytorchReplicaSpecs": {"Worker": workers}}}
    yield PendingReason(
        what="wrong number of pods",
        why=f"the {kind.resource.kind} asks for {pods} pods, and the job has"
        f" {hosts} {'host' if hosts == 1 else 'hosts'}",
        advice=f"set it back: `kubectl -n {lookup(job, ('metadata', 'namespace'))} patch"
        f" {kind.resource.word} {name_of(job)} --type merge -p '{json.dumps(patch)}'`",
    )


GRAVE = (
    "wrong number",
    *("quota", "admission", "invalid", "no pod"),
    *("ErrImage", "ImagePull", "InvalidImage", "Create", "Run"),
)


def gravity(trouble: PendingReason) -> tuple[int, str]:
    """Problems that do not resolve by themselves sort first."""
    grave = trouble.what.startswith(GRAVE)
    return (0 if grave else 1, trouble.pod)
