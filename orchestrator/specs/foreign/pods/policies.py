"""What a manifest says about the whole job: restarts, deadlines, priorities."""

from collections.abc import Iterator, Mapping
from typing import Any

from orchestrator.specs.foreign.carried import Carried, braced
from orchestrator.specs.foreign.pods.manifests import at

RULES = "rules of ndctl decide about failures (`ndctl policy list`)"
OWN_NAMES = "ndctl brings the ranks together by names of its own"
INSTEAD: Mapping[tuple[str, ...], str] = {
    ("activeDeadlineSeconds",): "a job of ndctl has no deadline",
    ("podFailurePolicy",): RULES,
    ("failurePolicy", "rules"): RULES,
    ("backoffLimitPerIndex",): RULES,
    ("maxFailedIndexes",): RULES,
    ("policies",): RULES,
    ("successPolicy",): "a job succeeds when all its ranks do",
    ("terminationGracePeriodSeconds",): "set resilience.stop_grace, the time to stop",
    ("hostname",): OWN_NAMES,
    ("subdomain",): OWN_NAMES,
    ("setHostnameAsFQDN",): OWN_NAMES,
    ("suspend",): "`ndctl submit` starts the job",
    ("schedulingPolicy", "queue"): "set cluster.kubernetes.queue for Kueue",
    ("schedulingPolicy", "priorityClass"): "set cluster.kubernetes.priority_class",
}
"""Path in a manifest -> what to do instead."""
DEFAULT_GRACE = ("terminationGracePeriodSeconds", 30)
"""An API server adds it to each pod."""


def set_policies(
    carried: Carried, kubernetes: dict[str, Any], one: Mapping[str, Any], pod: Mapping[str, Any]
) -> None:
    """The policies of the object `one` and of its pods `pod`."""
    spec = at(one, "spec") or {}
    policy = {**spec, **(spec.get("runPolicy") or {})}
    ttl = policy.get("ttlSecondsAfterFinished")
    if ttl is not None:
        kubernetes["ttl_after_finished"] = ttl
    restarts = next(
        (
            count
            for count in (
                policy.get("backoffLimit"),
                policy.get("maxRetry"),
                at(spec, "elasticPolicy", "maxRestarts"),
                at(spec, "failurePolicy", "maxRestarts"),
            )
            if isinstance(count, int)
        ),
        None,
    )
    if restarts is not None:  # 0: the job must never restart
        carried.resilience["max_restarts"] = restarts
    if any(at(one, "restartPolicy") == "Never" for one in _replicas(spec)) and not restarts:
        # Of Kubeflow, beside the template. In a pod, ndctl's own policy is the same.
        carried.leave("restartPolicy Never: set resilience.max_restarts: 0, if you mean the job")
    if klass := spec.get("priorityClassName"):  # of Volcano, for pods without one
        kubernetes.setdefault("priority_class", braced(klass))
    for part in (*_parts(spec), pod):
        for path, instead in INSTEAD.items():
            value = at(part, *path)
            # Kueue suspends each job of its queues, and resumes it.
            by_kueue = path == ("suspend",) and "queue" in kubernetes
            if value and not by_kueue and (path[-1], value) != DEFAULT_GRACE:
                named = f" {value}" if isinstance(value, str | int) and value is not True else ""
                carried.leave(f"{'.'.join(path)}{named}: {instead}")


def _replicas(spec: Any) -> Iterator[Any]:
    for kind in ("pytorchReplicaSpecs", "mpiReplicaSpecs"):
        replicas = at(spec, kind)
        yield from replicas.values() if isinstance(replicas, dict) else ()


def _parts(spec: Any) -> Iterator[Any]:
    """`spec`, and what inside of it has policies of its own: jobs of a JobSet, tasks of Volcano."""
    yield spec
    yield at(spec, "runPolicy")
    yield from at(spec, "tasks") or []
    for job in at(spec, "replicatedJobs") or []:
        yield at(job, "template", "spec")
    if at(spec, "template", "spec") is not None:
        yield from _parts(at(spec, "template", "spec"))
