"""Stand-in for the controller of JobSet v1alpha2 and of the indexed Jobs in it.

The pods belong to the JobSet itself, because Jobs of an old API server have neither indexes nor
suspension.
"""

import copy
import hashlib
from dataclasses import dataclass
from typing import Any

from tests.kubernetes.standins.api import Api, Object, path
from tests.kubernetes.standins.operator import (
    age_s,
    create_pod,
    delete_pods,
    has_condition,
    headless_service,
    phase,
    set_condition,
    write_status,
)

PREFIX = "jobset.sigs.k8s.io/"
INDEX = "batch.kubernetes.io/job-completion-index"
BACKOFF_LIMIT = 6


@dataclass(frozen=True)
class Job:
    """One Job of a JobSet."""

    kind: str
    """Name of its replicatedJob."""
    index: int
    global_index: int
    """Index among all Jobs of the JobSet."""
    template: Object

    def name(self, jobset: Object) -> str:
        return f"{jobset['metadata']['name']}-{self.kind}-{self.index}"


@dataclass(frozen=True)
class JobSets:
    api: Api
    resource: str = "jobsets"

    async def reconcile(self, job: Object, pods: list[Object]) -> None:
        status = copy.deepcopy(job.get("status") or {})
        conditions = status.setdefault("conditions", [])
        status.setdefault("restarts", 0)
        if "terminalState" in status:
            await delete_pods(self.api, [pod for pod in pods if _active(pod)])
            await self._expire(job, conditions)
        elif job["spec"].get("suspend"):
            await delete_pods(self.api, pods)
            message = "jobset is suspended"
            set_condition(conditions, "Suspended", True, "SuspendedJobs", message)
        else:
            if has_condition(conditions, "Suspended"):
                message = "jobset is resumed"
                set_condition(conditions, "Suspended", False, "ResumeJobs", message)
            await self._run(job, pods, status)
        await write_status(self.api, self.resource, job, status)

    async def _expire(self, job: Object, conditions: list[Object]) -> None:
        ttl, metadata = job["spec"].get("ttlSecondsAfterFinished"), job["metadata"]
        if ttl is not None and age_s(conditions[-1]["lastTransitionTime"]) >= ttl:
            await self.api.delete(path(self.resource, metadata["namespace"], metadata["name"]))

    async def _run(self, jobset: Object, pods: list[Object], status: Object) -> None:
        attempt = str(status["restarts"])
        old = [pod for pod in pods if _label(pod, PREFIX + "restart-attempt") != attempt]
        await delete_pods(self.api, old)
        if old:
            return  # The next attempt starts when all pods of the previous one are gone.
        network = jobset["spec"].get("network") or {}
        if network.get("enableDNSHostnames", True):
            selector = {PREFIX + "jobset-name": jobset["metadata"]["name"]}
            await headless_service(self.api, jobset, _subdomain(jobset), selector, [])
        ends: dict[str, list[str]] = {}
        counts = []
        for kind, jobs in _jobs(jobset).items():
            ends[kind] = [await self._job(jobset, each, pods, attempt) for each in jobs]
            counts.append({"name": kind, **_counts(ends[kind], kind, pods)})
        status["replicatedJobsStatus"] = counts
        _conclude(jobset, ends, status)

    async def _job(self, jobset: Object, job: Job, pods: list[Object], attempt: str) -> str:
        """`succeeded`, `active`, or the reason why the Job failed."""
        theirs = [pod for pod in pods if _label(pod, "job-name") == job.name(jobset)]
        spec = job.template["spec"]
        count = spec.get("completions", spec.get("parallelism", 1))
        verdicts = [_verdict(spec, pod) for pod in theirs if phase(pod) == "Failed"]
        if "FailJob" in verdicts:
            return "PodFailurePolicy"
        if verdicts.count("Count") > spec.get("backoffLimit", BACKOFF_LIMIT):
            return "BackoffLimitExceeded"
        done = {_label(pod, INDEX) for pod in theirs if phase(pod) == "Succeeded"}
        if len(done) == count:
            return "succeeded"
        alive = {_label(pod, INDEX) for pod in theirs if _active(pod)}
        for index in range(count):
            if str(index) not in done | alive:
                tries = [
                    pod["metadata"]["name"] for pod in theirs if _label(pod, INDEX) == str(index)
                ]
                await self._create(jobset, job, index, attempt, tries)
        return "active"

    async def _create(
        self, jobset: Object, job: Job, index: int, attempt: str, tries: list[str]
    ) -> None:
        name, own = job.name(jobset), jobset["metadata"]["name"]
        labels = {
            PREFIX + "jobset-name": own,
            PREFIX + "jobset-uid": jobset["metadata"]["uid"],
            PREFIX + "replicatedjob-name": job.kind,
            PREFIX + "job-index": str(job.index),
            PREFIX + "job-global-index": str(job.global_index),
            PREFIX + "restart-attempt": attempt,
            "job-name": name,
            "batch.kubernetes.io/job-name": name,
            INDEX: str(index),
        }
        coordinator: dict[str, Any] | None = jobset["spec"].get("coordinator")
        if coordinator:
            first = f"{own}-{coordinator['replicatedJob']}-{coordinator.get('jobIndex', 0)}"
            where = f"{first}-{coordinator.get('podIndex', 0)}.{_subdomain(jobset)}"
            labels[PREFIX + "coordinator"] = where
        template = copy.deepcopy(job.template["spec"]["template"])
        above = job.template.get("metadata", {})
        metadata = template.setdefault("metadata", {})
        marks = {key: value for key, value in labels.items() if PREFIX in key or key == INDEX}
        metadata["annotations"] = {**metadata.get("annotations", {}), **marks}
        labels = {**above.get("labels", {}), **labels}
        template["spec"].setdefault("restartPolicy", "OnFailure")  # as JobSet's webhook does
        template["spec"]["hostname"] = f"{name}-{index}"
        template["spec"]["subdomain"] = _subdomain(jobset)
        field = {"fieldRef": {"fieldPath": f"metadata.annotations['{INDEX}']"}}
        for container in template["spec"]["containers"]:
            env = container.setdefault("env", [])
            env.append({"name": "JOB_COMPLETION_INDEX", "valueFrom": field})
        seed = f"{jobset['metadata']['uid']} {attempt} {sorted(tries)}"
        suffix = hashlib.sha256(seed.encode()).hexdigest()[:5]
        await create_pod(self.api, jobset, f"{name}-{index}-{suffix}", template, labels)


def _jobs(jobset: Object) -> dict[str, list[Job]]:
    found: dict[str, list[Job]] = {}
    at = 0
    for each in jobset["spec"]["replicatedJobs"]:
        for index in range(each.get("replicas", 1)):
            found.setdefault(each["name"], []).append(
                Job(each["name"], index, at, each["template"])
            )
            at += 1
    return found


def _counts(ends: list[str], kind: str, pods: list[Object]) -> Object:
    alive = [
        pod
        for pod in pods
        if _label(pod, PREFIX + "replicatedjob-name") == kind and phase(pod) == "Running"
    ]
    active, succeeded = ends.count("active"), ends.count("succeeded")
    counts = {"ready": active if alive else 0, "active": active, "succeeded": succeeded}
    return {**counts, "failed": len(ends) - active - succeeded, "suspended": 0}


def _conclude(jobset: Object, ends: dict[str, list[str]], status: Object) -> None:
    policy = jobset["spec"].get("successPolicy") or {}
    decide = policy.get("targetReplicatedJobs") or list(ends)
    done = [end == "succeeded" for kind in decide for end in ends[kind]]
    if any(done) if policy.get("operator") == "Any" else all(done):
        message = "jobset completed successfully"
        set_condition(status["conditions"], "Completed", True, "AllJobsCompleted", message)
        status["terminalState"] = "Completed"
        return
    for kind, each in ends.items():
        for index, end in enumerate(each):
            if end not in ("active", "succeeded"):
                name = f"{jobset['metadata']['name']}-{kind}-{index}"
                _failed(jobset, kind, name, end, status)
                return


def _failed(jobset: Object, kind: str, name: str, why: str, status: Object) -> None:
    policy = jobset["spec"].get("failurePolicy") or {}
    action = "RestartJobSet"
    for rule in policy.get("rules", ()):
        reasons, targets = rule.get("onJobFailureReasons"), rule.get("targetReplicatedJobs")
        if (not reasons or why in reasons) and (not targets or kind in targets):
            action = rule["action"]
            break
    counted = action == "RestartJobSet"
    limit = policy.get("maxRestarts", 0)
    if action == "FailJobSet" or (counted and status.get("restartsCountTowardsMax", 0) >= limit):
        message = f"jobset failed due to one or more job failures (first failed job: {name})"
        reason = "ReachedMaxRestarts" if counted and limit else "FailedJobs"
        set_condition(status["conditions"], "Failed", True, reason, message)
        status["terminalState"] = "Failed"
        return
    status["restarts"] += 1
    status["restartsCountTowardsMax"] = status.get("restartsCountTowardsMax", 0) + int(counted)


def _verdict(spec: Object, pod: Object) -> str:
    """The action of a Job's podFailurePolicy for a failed pod."""
    status = pod["status"]
    for rule in (spec.get("podFailurePolicy") or {}).get("rules", ()):
        held = {it["type"] for it in status.get("conditions", ()) if it["status"] == "True"}
        if held & {it["type"] for it in rule.get("onPodConditions", ())}:
            return str(rule["action"])
        if codes := rule.get("onExitCodes"):
            ended = {
                it["state"]["terminated"]["exitCode"]
                for it in status.get("containerStatuses", ())
                if "terminated" in it["state"] and codes.get("containerName") in (None, it["name"])
            } - {0}
            among = ended & set(codes["values"])
            if among if codes["operator"] == "In" else ended - set(codes["values"]):
                return str(rule["action"])
    return "Count"


def _subdomain(jobset: Object) -> str:
    network = jobset["spec"].get("network") or {}
    return str(network.get("subdomain") or jobset["metadata"]["name"])


def _label(pod: Object, name: str) -> str:
    return str(pod["metadata"].get("labels", {}).get(name, ""))


def _active(pod: Object) -> bool:
    over = phase(pod) in ("Succeeded", "Failed")
    return not over and "deletionTimestamp" not in pod["metadata"]
