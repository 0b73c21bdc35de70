"""Render the custom resource that creates the pods of a job. Pure.

All of them have one pod for each host and leave it to the agents what to do when a rank or a host
is lost: a pod is made anew only when it is gone, or left with a code of 128 and more.
"""

from typing import Any

from orchestrator.backends.kubernetes.render import names
from orchestrator.backends.kubernetes.render.pods import pod_template, spec_of
from orchestrator.contract.spec.kubernetes_spec import KubernetesSpec
from orchestrator.contract.submission_payload import Handover

TRAINER = "trainer.kubeflow.org/v1alpha1"
MASTER_PORT = 29500
"""As torchrun's own, and Trainer v2's; a PyTorchJob sets another."""
NO_GANG = (None, "auto")
"""`auto` is what no cluster was asked about."""
NO_LIMIT = 2**31 - 1
"""Of how often pods may be made anew: the journal knows `resilience.max_restarts`."""
FINAL_CODES = range(1, 128)
"""Exit codes after which another try would end alike, as with `restartPolicy: ExitCode`."""


def pytorchjob(handover: Handover, metadata: dict[str, Any]) -> list[dict[str, Any]]:
    launch, spec = handover.launch, spec_of(handover.launch)
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
                    # What has ended stays, for its log; what has not keeps no device.
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
    master = {
        "MASTER_ADDR": names.leader_host_of(launch.job),
        "MASTER_PORT": str(MASTER_PORT),
    }
    template = pod_template(handover, master)
    body = {**_jobset_body(template, len(launch.hosts)), **_ttl(spec_of(launch))}
    return [
        {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": metadata,
            "spec": body,
        }
    ]


def trainjob(handover: Handover, metadata: dict[str, Any]) -> list[dict[str, Any]]:
    """With a runtime of its own: of a shared one a TrainJob cannot change the security context,
    the network, the affinity or the grace period."""
    launch, spec = handover.launch, spec_of(handover.launch)
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
            "trainer": {
                "numNodes": len(launch.hosts),
                "numProcPerNode": launch.devices_per_host,
            },
        },
    }
    return [runtime, job]


def _ttl(spec: KubernetesSpec) -> dict[str, int]:
    after = spec.ttl_after_finished
    return {} if after is None else {"ttlSecondsAfterFinished": after}


def _jobset_body(
    template: dict[str, Any], pods: int | None, labels: dict[str, str] | None = None
) -> dict[str, Any]:
    """`pods` is None where Trainer v2 says how many."""
    pod = {"restartPolicy": "Never", **template["spec"]}
    count = {} if pods is None else {"parallelism": pods, "completions": pods}
    job = {
        "completionMode": "Indexed",
        **count,
        "backoffLimit": NO_LIMIT,
        "podFailurePolicy": {"rules": _failure_rules(pod)},
        # The leader's end is the job's: a host that is away at that moment does not matter.
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
        # Preempted, evicted, drained: nobody's failure.
        {
            "action": "Ignore",
            "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
        },
        {
            "action": "FailJob",
            "onExitCodes": {
                "containerName": main,
                "operator": "In",
                "values": list(FINAL_CODES),
            },
        },
    ]
