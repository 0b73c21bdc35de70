"""Renders the custom resource that creates the pods of a job. Pure.

Each kind has one pod per host and leaves failures of ranks and hosts to the agents. The operator
recreates a pod only if it was deleted, or if it exited with a code of 128 or more.
"""

from typing import Any

from orchestrator.backends.kubernetes.render import names
from orchestrator.backends.kubernetes.render.pods import pod_template
from orchestrator.contract.spec.kubernetes_spec import KubernetesSpec
from orchestrator.contract.submission_payload import Handover

TRAINER = "trainer.kubeflow.org/v1alpha1"
MASTER_PORT = 29500
"""The default of torchrun and of Trainer v2. The PyTorchJob operator sets another."""
NO_GANG = (None, "auto")
"""`auto` remains if no cluster was asked."""
NO_LIMIT = 2**31 - 1
"""Unlimited recreations of pods, because the leader enforces `resilience.max_restarts`."""
FINAL_CODES = range(1, 128)
"""Exit codes that a retry would repeat, as with `restartPolicy: ExitCode`."""


def pytorchjob(handover: Handover, metadata: dict[str, Any]) -> list[dict[str, Any]]:
    launch, spec = handover.launch, handover.launch.kubernetes_spec
    template, workers = pod_template(handover), len(launch.hosts) - 1
    replica = {"restartPolicy": "ExitCode", "template": template}
    replicas = {"Master": {"replicas": 1, **replica}}
    if workers:
        replicas["Worker"] = {"replicas": workers, **replica}
    grouped = spec.gang_scheduler not in NO_GANG
    gang = {"schedulingPolicy": {"minAvailable": len(launch.hosts)}} if grouped else {}
    return [
        {
            "apiVersion": "kubeflow.org/v1",
            "kind": "PyTorchJob",
            "metadata": metadata,
            "spec": {
                "nprocPerNode": str(launch.devices_per_host),
                "runPolicy": {
                    # When the job ends, keep ended pods for their logs, and delete running ones.
                    "cleanPodPolicy": "Running",
                    "backoffLimit": NO_LIMIT,
                    **_ttl(spec),
                    **gang,
                },
                "pytorchReplicaSpecs": replicas,
            },
        }
    ]


def jobset(handover: Handover, metadata: dict[str, Any]) -> list[dict[str, Any]]:
    launch = handover.launch
    master = {"MASTER_ADDR": names.leader_host_of(launch.job), "MASTER_PORT": str(MASTER_PORT)}
    template = pod_template(handover, master)
    body = {**_jobset_body(template, len(launch.hosts)), **_ttl(launch.kubernetes_spec)}
    return [
        {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": metadata,
            "spec": body,
        }
    ]


def trainjob(handover: Handover, metadata: dict[str, Any]) -> list[dict[str, Any]]:
    """A TrainJob with its own TrainingRuntime, because a TrainJob cannot override the security
    context, the network, the affinity or the grace period of a shared one."""
    launch, spec = handover.launch, handover.launch.kubernetes_spec
    grouped = spec.gang_scheduler not in NO_GANG
    gang: dict[str, Any] = {"podGroupPolicy": {"coscheduling": {}}} if grouped else {}
    unqueued = {key: value for key, value in metadata["labels"].items() if key != names.QUEUE_LABEL}
    runtime_labels = {**unqueued, "trainer.kubeflow.org/framework": "torch"}
    body = _jobset_body(
        pod_template(handover), None, {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    )
    runtime = {
        "apiVersion": TRAINER,
        "kind": "TrainingRuntime",
        "metadata": {**metadata, "labels": runtime_labels},
        "spec": {
            "mlPolicy": {"numNodes": len(launch.hosts), "torch": {}},
            **gang,
            "template": {"spec": body},
        },
    }
    group = TRAINER.partition("/")[0]
    job = {
        "apiVersion": TRAINER,
        "kind": "TrainJob",
        "metadata": metadata,
        "spec": {
            "runtimeRef": {"apiGroup": group, "kind": "TrainingRuntime", "name": launch.job},
            "trainer": {"numNodes": len(launch.hosts), "numProcPerNode": launch.devices_per_host},
        },
    }
    return [runtime, job]


def _ttl(spec: KubernetesSpec) -> dict[str, int]:
    after = spec.ttl_after_finished
    return {} if after is None else {"ttlSecondsAfterFinished": after}


def _jobset_body(
    template: dict[str, Any], pods: int | None, labels: dict[str, str] | None = None
) -> dict[str, Any]:
    """`pods` is None if Trainer v2 sets the number."""
    pod = {"restartPolicy": "Never", **template["spec"]}
    count = {} if pods is None else {"parallelism": pods, "completions": pods}
    job = {
        "completionMode": "Indexed",
        **count,
        "backoffLimit": NO_LIMIT,
        # The Job controller waits before it replaces a failed pod: 10 s, twice as long after each
        # further failure, at most 10 minutes. Without this field it counts the failures of all
        # pods together, so that a host would wait for the failures of others.
        "backoffLimitPerIndex": NO_LIMIT,
        "podFailurePolicy": {"rules": _failure_rules(pod)},
        # The job succeeds when the leader's pod does, even if another pod is missing then.
        "successPolicy": {"rules": [{"succeededIndexes": "0"}]},
        "template": {**template, "spec": pod},
    }
    replicated = {
        "name": names.NODE,
        "replicas": 1,
        "template": {**({"metadata": {"labels": labels}} if labels else {}), "spec": job},
    }
    return {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "successPolicy": {"operator": "All"},
        "failurePolicy": {"maxRestarts": 0},
        "replicatedJobs": [replicated],
    }


def _failure_rules(pod: dict[str, Any]) -> list[dict[str, Any]]:
    main = pod["containers"][0]["name"]
    return [
        # Preemptions, evictions and drains do not count as failures.
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {
            "action": "FailJob",
            "onExitCodes": {"containerName": main, "operator": "In", "values": list(FINAL_CODES)},
        },
    ]
