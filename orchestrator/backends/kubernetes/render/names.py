"""Names and labels of the objects of a job. Pure."""

import hashlib
import re
from collections.abc import Mapping

from orchestrator.contract.launch import LaunchPlan
from orchestrator.contract.spec.kubernetes_spec import Kind

FIELD_MANAGER = "ndctl"
JOB_LABEL = "ndctl.dev/job"
LAUNCH_ANNOTATION = "ndctl.dev/launch"
HASH_ANNOTATION = "ndctl.dev/spec-hash"
CANCELLED_ANNOTATION = "ndctl.dev/cancelled-by"

# On ConfigMap JOB-launch, written by the job's pods. What they ask of the controller:
AVOID_ANNOTATION = "ndctl.dev/avoid"
"""Nodes that new pods of the job must avoid."""
END_ANNOTATION = "ndctl.dev/end-pods"
"""Pods of the job to delete and replace."""
GANG_ANNOTATION = "ndctl.dev/gang-restart"
"""Request to replace all pods."""
# Notes for other pods and for people:
RUNS_ANNOTATION = "ndctl.dev/runs"
"""The spec-hash of what the job runs: what is applied later under the same launch does not."""
REQUEUES_ANNOTATION = "ndctl.dev/requeues"
"""How often the leader requeued all pods."""
NEVER_BEGAN_ANNOTATION = "ndctl.dev/leader-never-began"
"""The nodes that the leader's pod was taken away from, because it never began there."""
WRITTEN_BY_PODS = (
    *(AVOID_ANNOTATION, END_ANNOTATION, GANG_ANNOTATION),
    *(RUNS_ANNOTATION, REQUEUES_ANNOTATION, NEVER_BEGAN_ANNOTATION),
)

# On the job, written by the controller:
CONTROLLER_ANNOTATION = "ndctl.dev/controller"
"""The namespace of the Lease of the controller that looks after the job."""
EXCLUDED_ANNOTATION = "ndctl.dev/excluded"
"""Of a job: the nodes that the controller keeps its new pods off. Of a node: the job."""
SUSPENDED_ANNOTATION = "ndctl.dev/suspended-by"
"""The controller suspended the job, and so may resume it."""
RESTARTED_ANNOTATION = "ndctl.dev/gang-restarted"
"""Which gang restart was carried out last: `digest` of what asked for it."""
RESTARTS_ANNOTATION = "ndctl.dev/gang-restarts"
"""How many were."""
STATE_ANNOTATION = "ndctl.dev/state"
STEP_ANNOTATION = "ndctl.dev/step"
ATTEMPT_ANNOTATION = "ndctl.dev/attempt"
CULPRIT_ANNOTATION = "ndctl.dev/culprit"
MESSAGE_ANNOTATION = "ndctl.dev/message"
UPDATED_ANNOTATION = "ndctl.dev/updated"
"""Of a job: what its ConfigMap `JOB-state` says, where a controller copies it there."""
REPORT_ANNOTATION = "ndctl.dev/report"
"""Of ConfigMap `JOB-state` and of an event about a job: what its leader reported, as JSON."""
HOLDS_LABEL = "ndctl.dev/holds"
"""Of a ConfigMap of a job: `state`, where it is the one that its leader writes."""
KEEPS_OFF_LABEL = "ndctl.dev/keeps-off"
"""Of a placeholder: the job whose pods are not to come to its node."""
FORCE_ANNOTATION = "ndctl.dev/force-delete-after"
"""Of a pod: seconds that a node may be silent before its pods are deleted by force."""
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
MANAGED_LABEL = "app.kubernetes.io/managed-by"
TOKEN_KEY = "token"
KIND_VARIABLE = "NDCTL_JOB_KIND"
"""Tells a pod of which kind of object it is: what is mounted may be of a later one of its name."""
NODE = "node"
"""JobSet's replicated job, and the container that Trainer v2 looks for."""
LABEL_LIMIT = 63
"""Of a pod's name: it is a host name and the value of a label as well (RFC 1035)."""


CONTAINERS: dict[Kind, str] = {"pytorchjob": "pytorch", "jobset": "pytorch", "trainjob": NODE}
"""The container that runs the agent; the operators look for these names."""


def config_map_of(job: str) -> str:
    return f"{job}-launch"


def state_map_of(job: str) -> str:
    """The ConfigMap in which the leader says how the job stands."""
    return f"{job}-state"


def secret_of(job: str) -> str:
    return f"{job}-token"


def account_of(job: str) -> str:
    """The name of the pods' account, of its Role, of the binding of both, and of the NetworkPolicy
    of the pods."""
    return f"{job}-pods"


def pytorchjob_pods(job: str, pods: int) -> list[str]:
    return [f"{job}-master-0", *(f"{job}-worker-{number}" for number in range(pods - 1))]


def placeholder_of(job: str, host: str) -> str:
    """One for each node that a job leaves out."""
    return f"{job}-not-on-{hashlib.sha256(host.encode()).hexdigest()[:8]}"


def leader_host_of(job: str) -> str:
    """The host name of the leader's pod, in a JobSet."""
    return f"{job}-{NODE}-0-0.{job}"


def longest_pod_name(kind: Kind, job: str, pods: int) -> str:
    """As the operator makes them."""
    if kind == "pytorchjob":
        return f"{job}-worker-{pods - 2}" if pods > 1 else f"{job}-master-0"
    return f"{job}-{NODE}-0-{pods - 1}-xxxxx"


POD_NAMES: Mapping[Kind, str] = {
    "pytorchjob": r"{job}-(master|worker)-\d+",
    "jobset": r"{job}-node-0-\d+-[a-z0-9]{{5}}",
    "trainjob": r"{job}-node-0-\d+-[a-z0-9]{{5}}",
}


def is_pod_of(kind: Kind, job: str, pod: str) -> bool:
    """By its name, of this job and no other whose name begins alike; what is deleted has no more
    than that left."""
    return re.fullmatch(POD_NAMES[kind].format(job=re.escape(job)), pod) is not None


def labels_of(launch: LaunchPlan) -> dict[str, str]:
    """On every object of a job; JOB_LABEL alone selects them."""
    return labels_of_job(launch.job)


def labels_of_job(job: str) -> dict[str, str]:
    return {
        "app.kubernetes.io/name": "ndctl",
        "app.kubernetes.io/instance": job,
        "app.kubernetes.io/component": "training",
        "app.kubernetes.io/part-of": "ndctl",
        MANAGED_LABEL: "ndctl",
        JOB_LABEL: job,
    }
