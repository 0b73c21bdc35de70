"""Stand-in for the controller of JobSet v1alpha2, together with the indexed Jobs in it.

The pods belong to the JobSet itself, because Jobs of an old API server have neither indexes nor
suspension. `../traces` has recordings of the real controllers.
"""

import copy
import hashlib
from dataclasses import dataclass
from typing import Any

from tests.kubernetes.standins.api import Api, Object, path
from tests.kubernetes.standins.indexed_job import (
    COMPLETE,
    INDEX,
    has_ended,
    index_of,
    is_active,
    is_ready,
    missing,
    outcome,
)
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
from tests.kubernetes.standins.pod import post_event

PREFIX = "jobset.sigs.k8s.io/"
FAILURES = "batch.kubernetes.io/job-index-failure-count"
RESTART_ACTIONS = ("RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts")


@dataclass(frozen=True)
class Job:
    """One Job of a JobSet, with its pods."""

    kind: str
    """Name of its replicatedJob."""
    index: int
    global_index: int
    """Index among all Jobs of the JobSet."""
    replicas: int
    """Number of Jobs of its replicatedJob."""
    template: Object
    name: str
    pods: list[Object]

    @property
    def spec(self) -> Object:
        spec: Object = self.template["spec"]
        return spec

    @property
    def outcome(self) -> str:
        return outcome(self.spec, self.pods)

    @property
    def end(self) -> str:
        """Its outcome once all pods have ended; the Job controller reports it only then."""
        return self.outcome if all(map(has_ended, self.pods)) else ""

    @property
    def is_ready(self) -> bool:
        parallelism = int(self.spec.get("parallelism") or 1)
        needed = min(parallelism, int(self.spec.get("completions") or parallelism))
        return sum(phase(pod) == "Succeeded" or is_ready(pod) for pod in self.pods) >= needed


@dataclass(frozen=True)
class JobSets:
    api: Api
    resource: str = "jobsets"

    async def reconcile(self, jobset: Object, pods: list[Object]) -> None:
        status = copy.deepcopy(jobset.get("status") or {})
        conditions = status.setdefault("conditions", [])
        status.setdefault("restarts", 0)
        before = copy.deepcopy(conditions)
        attempt = str(status["restarts"])
        own = [pod for pod in pods if _label(pod, PREFIX + "restart-attempt") == attempt]
        jobs = _jobs(jobset, own)
        suspended = bool(jobset["spec"].get("suspend"))
        status["replicatedJobsStatus"] = _counts(jobs, suspended)
        if "terminalState" in status:
            await delete_pods(self.api, [pod for job in jobs if not job.end for pod in job.pods])
            await self._expire(jobset, conditions)
        elif suspended:
            await delete_pods(self.api, pods)
            _set(status, "Suspended", True, "SuspendedJobs", "jobset is suspended")
        else:
            if has_condition(conditions, "Suspended"):
                _set(status, "Suspended", False, "ResumeJobs", "jobset is resumed")
            await self._run(jobset, jobs, pods, status)
        await write_status(self.api, self.resource, jobset, status)
        await self._post_events(jobset, before, conditions)

    async def _post_events(
        self, jobset: Object, before: list[Object], conditions: list[Object]
    ) -> None:
        """One event for each condition that changed."""
        for one in conditions:
            if one not in before:
                bad = one["status"] == "True" and one["type"] in ("Failed", "Restarting")
                kind = "Warning" if bad else "Normal"
                await post_event(self.api, jobset, kind, one["reason"], one["message"])

    async def _expire(self, jobset: Object, conditions: list[Object]) -> None:
        ttl, metadata = jobset["spec"].get("ttlSecondsAfterFinished"), jobset["metadata"]
        if ttl is not None and age_s(conditions[-1]["lastTransitionTime"]) >= ttl:
            await self.api.delete(path(self.resource, metadata["namespace"], metadata["name"]))

    async def _run(
        self, jobset: Object, jobs: list[Job], pods: list[Object], status: Object
    ) -> None:
        own = {pod["metadata"]["uid"] for job in jobs for pod in job.pods}
        old = [pod for pod in pods if pod["metadata"]["uid"] not in own]
        await delete_pods(self.api, old)
        if old:
            return  # The next attempt starts when all pods of the previous one are gone.
        if has_condition(status["conditions"], "Restarting") and all(it.is_ready for it in jobs):
            _set(status, "Restarting", False, "JobsReady", "all jobs are ready")
        if failed := [job for job in jobs if job.end not in ("", COMPLETE)]:
            _fail(jobset, failed, status)
            return
        if _is_complete(jobset, jobs):
            message = "jobset completed successfully"
            _set(status, "Completed", True, "AllJobsCompleted", message)
            status["terminalState"] = "Completed"
            return
        network = jobset["spec"].get("network") or {}
        if network.get("enableDNSHostnames", True):
            selector = {PREFIX + "jobset-name": jobset["metadata"]["name"]}
            await headless_service(self.api, jobset, _subdomain(jobset), selector, [], labels={})
        for job in jobs:
            await self._manage(jobset, job, str(status["restarts"]))

    async def _manage(self, jobset: Object, job: Job, attempt: str) -> None:
        """What the Job controller does."""
        if job.outcome:
            await delete_pods(self.api, [pod for pod in job.pods if is_active(pod)])
            return
        for index in missing(job.spec, job.pods):
            await self._create(jobset, job, index, attempt)

    async def _create(self, jobset: Object, job: Job, index: int, attempt: str) -> None:
        marks = {**_marks(jobset, job, attempt), INDEX: str(index)}
        uid = jobset["metadata"]["uid"]
        labels = {
            **marks,
            PREFIX + "priority": "0",  # JobSet's webhook for pods adds it.
            "job-name": job.name,
            "batch.kubernetes.io/job-name": job.name,
            "controller-uid": uid,
            "batch.kubernetes.io/controller-uid": uid,
        }
        template = copy.deepcopy(job.template["spec"]["template"])
        metadata = template.setdefault("metadata", {})
        metadata["annotations"] = {**metadata.get("annotations", {}), **marks}
        tries = [pod for pod in job.pods if index_of(pod) == index]
        if "backoffLimitPerIndex" in job.spec:
            failures = sum(phase(pod) == "Failed" for pod in tries)
            metadata["annotations"][FAILURES] = str(failures)
        template["spec"].setdefault("restartPolicy", "OnFailure")  # as JobSet's webhook does
        template["spec"]["hostname"] = f"{job.name}-{index}"
        template["spec"]["subdomain"] = _subdomain(jobset)
        field = {"fieldRef": {"fieldPath": f"metadata.labels['{INDEX}']"}}
        for container in template["spec"]["containers"]:
            env = container.setdefault("env", [])
            env.append({"name": "JOB_COMPLETION_INDEX", "valueFrom": field})
        seed = f"{uid} {attempt} {sorted(pod['metadata']['name'] for pod in tries)}"
        suffix = hashlib.sha256(seed.encode()).hexdigest()[:5]
        name, maker = f"{job.name}-{index}-{suffix}", _job_object(jobset, job)
        await create_pod(self.api, jobset, name, template, labels, maker=maker)


def _job_object(jobset: Object, job: Job) -> Object:
    """The Job, as its controller's events name it."""
    metadata = {"name": job.name, "namespace": jobset["metadata"]["namespace"]}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": job.spec}


def _marks(jobset: Object, job: Job, attempt: str) -> dict[str, str]:
    """What JobSet writes into labels and annotations of a pod."""
    own, jobs = jobset["metadata"]["name"], jobset["spec"]["replicatedJobs"]
    key = hashlib.sha1(
        f"{jobset['metadata']['namespace']}/{job.name}".encode(), usedforsecurity=False
    )
    total = str(sum(each.get("replicas", 1) for each in jobs))
    marks = {
        "jobset-name": own,
        "jobset-uid": jobset["metadata"]["uid"],
        "replicatedjob-name": job.kind,
        "replicatedjob-replicas": str(job.replicas),
        "global-replicas": total,
        "job-index": str(job.index),
        "job-key": key.hexdigest(),
        "job-global-index": str(job.global_index),
        "restart-attempt": attempt,
        "group-name": "default",
        "group-replicas": total,
        "job-group-index": str(job.global_index),
    }
    coordinator: dict[str, Any] | None = jobset["spec"].get("coordinator")
    if coordinator:
        first = f"{own}-{coordinator['replicatedJob']}-{coordinator.get('jobIndex', 0)}"
        where = f"{first}-{coordinator.get('podIndex', 0)}.{_subdomain(jobset)}"
        marks["coordinator"] = where
    return {PREFIX + key: value for key, value in marks.items()}


def _jobs(jobset: Object, pods: list[Object]) -> list[Job]:
    found: list[Job] = []
    for each in jobset["spec"]["replicatedJobs"]:
        for index in range(each.get("replicas", 1)):
            name = f"{jobset['metadata']['name']}-{each['name']}-{index}"
            theirs = [pod for pod in pods if _label(pod, "job-name") == name]
            job = Job(
                kind=each["name"],
                index=index,
                global_index=len(found),
                replicas=each.get("replicas", 1),
                template=each["template"],
                name=name,
                pods=theirs,
            )
            found.append(job)
    return found


def _counts(jobs: list[Job], suspended: bool) -> list[Object]:
    """The status of each replicatedJob."""
    counts = []
    for kind in dict.fromkeys(job.kind for job in jobs):
        mine = [job for job in jobs if job.kind == kind]
        going = [job for job in mine if not job.end]
        counts.append(
            {
                "name": kind,
                "ready": sum(job.is_ready for job in going),
                "active": sum(any(map(is_active, job.pods)) for job in going),
                "succeeded": sum(job.end == COMPLETE for job in mine),
                "failed": sum(job.end not in ("", COMPLETE) for job in mine),
                "suspended": len(going) if suspended else 0,
            }
        )
    return counts


def _is_complete(jobset: Object, jobs: list[Job]) -> bool:
    policy = jobset["spec"].get("successPolicy") or {}
    targets = policy.get("targetReplicatedJobs")
    done = [job.end == COMPLETE for job in jobs if not targets or job.kind in targets]
    return any(done) if policy.get("operator") == "Any" else all(done)


def _fail(jobset: Object, failed: list[Job], status: Object) -> None:
    """Applies the failure policy."""
    first = f"(first failed job: {failed[0].name})"
    policy = jobset["spec"].get("failurePolicy")
    if policy is None:
        _end(status, "FailedJobs", f"jobset failed due to one or more job failures {first}")
        return
    rule = _rule(policy, failed)
    action = rule["action"] if rule else "RestartJobSet"
    counted = action == "RestartJobSet"
    if action == "FailJobSet":
        message = f"applying FailJobSet failure policy action {first}"
        _end(status, "FailJobSetFailurePolicyAction", message)
    elif counted and status.get("restartsCountTowardsMax", 0) >= policy.get("maxRestarts", 0):
        message = f"jobset failed due to reaching max number of restarts {first}"
        _end(status, "ReachedMaxRestarts", message)
    else:
        assert action in RESTART_ACTIONS, action
        reason = f"FailurePolicy_{rule.get('name', '')}" if rule else "DefaultFailurePolicy"
        message = f"applying {action} failure policy action {first}"
        _set(status, "Restarting", True, reason, message)
        status["restarts"] += 1
        status["restartsCountTowardsMax"] = status.get("restartsCountTowardsMax", 0) + int(counted)


def _rule(policy: Object, failed: list[Job]) -> Object | None:
    """The first rule for the failed Jobs; None if there is none."""
    for rule in policy.get("rules", ()):
        reasons, targets = rule.get("onJobFailureReasons"), rule.get("targetReplicatedJobs")
        for job in failed:
            if (not reasons or job.end in reasons) and (not targets or job.kind in targets):
                found: Object = rule
                return found
    return None


def _end(status: Object, reason: str, message: str) -> None:
    _set(status, "Failed", True, reason, message)
    status["terminalState"] = "Failed"


def _set(status: Object, kind: str, holds: bool, reason: str, message: str) -> None:
    set_condition(status["conditions"], kind, holds, reason, message)


def _subdomain(jobset: Object) -> str:
    network = jobset["spec"].get("network") or {}
    return str(network.get("subdomain") or jobset["metadata"]["name"])


def _label(pod: Object, name: str) -> str:
    return str(pod["metadata"].get("labels", {}).get(name, ""))
