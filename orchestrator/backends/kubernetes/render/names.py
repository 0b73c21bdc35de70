"""Names and labels of the objects of a job. Pure."""

import hashlib
import re
from collections.abc import Mapping

from orchestrator.contract.launch import LaunchPlan
from orchestrator.contract.spec.kubernetes_spec import Kind

JOB_LABEL = "ndctl.dev/job"
LAUNCH_ANNOTATION = "ndctl.dev/launch"
HASH_ANNOTATION = "ndctl.dev/spec-hash"
CANCELLED_ANNOTATION = "ndctl.dev/cancelled-by"

# On ConfigMap JOB-launch, written by the job's pods. Requests to the controller:
AVOID_ANNOTATION = "ndctl.dev/avoid"
"""Nodes that new pods of the job must avoid."""
END_ANNOTATION = "ndctl.dev/end-pods"
"""Pods of the job to delete and replace."""
GANG_ANNOTATION = "ndctl.dev/gang-restart"
"""Request to replace all pods."""
# Notes for other pods and for people:
RUNS_ANNOTATION = "ndctl.dev/runs"
"""The spec-hash of the objects that the job runs. Objects applied later for the same launch
differ."""
REQUEUES_ANNOTATION = "ndctl.dev/requeues"
"""How often the leader requeued all pods."""
NEVER_BEGAN_ANNOTATION = "ndctl.dev/leader-never-began"
"""Nodes that the leader's pod was moved away from, because it never started there."""
WRITTEN_BY_PODS = (
    *(AVOID_ANNOTATION, END_ANNOTATION, GANG_ANNOTATION),
    *(RUNS_ANNOTATION, REQUEUES_ANNOTATION, NEVER_BEGAN_ANNOTATION),
)

# On the job, written by the controller:
CONTROLLER_ANNOTATION = "ndctl.dev/controller"
"""The namespace of the Lease of the controller that manages the job."""
EXCLUDED_ANNOTATION = "ndctl.dev/excluded"
"""On a job: nodes that the controller excludes for new pods. On a node: the job that excludes
it."""
SUSPENDED_ANNOTATION = "ndctl.dev/suspended-by"
"""The controller suspended the job, and so may resume it."""
RESTARTED_ANNOTATION = "ndctl.dev/gang-restarted"
"""Digest of the request of the last finished gang restart."""
RESTARTS_ANNOTATION = "ndctl.dev/gang-restarts"
"""Number of gang restarts."""
STATE_ANNOTATION = "ndctl.dev/state"
STEP_ANNOTATION = "ndctl.dev/step"
ATTEMPT_ANNOTATION = "ndctl.dev/attempt"
CULPRIT_ANNOTATION = "ndctl.dev/culprit"
MESSAGE_ANNOTATION = "ndctl.dev/message"
UPDATED_ANNOTATION = "ndctl.dev/updated"
"""On a job: the content of ConfigMap `JOB-state`, copied by the controller."""
REPORT_ANNOTATION = "ndctl.dev/report"
"""On ConfigMap `JOB-state` and on events about a job: the leader's report as JSON."""
HOLDS_LABEL = "ndctl.dev/holds"
"""On a ConfigMap of a job: `state` for the one that the leader writes."""
KEEPS_OFF_LABEL = "ndctl.dev/keeps-off"
"""On a placeholder: the job whose pods must not run on its node."""
FORCE_ANNOTATION = "ndctl.dev/force-delete-after"
"""On a pod: seconds that its node may be unreachable before the pod is deleted by force."""
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
MANAGED_LABEL = "app.kubernetes.io/managed-by"
TOKEN_KEY = "token"
KIND_VARIABLE = "NDCTL_JOB_KIND"
"""The kind of the pod's job. The mounted ConfigMap may belong to a later job of the same name."""
NODE = "node"
"""JobSet's replicated job, and the container that Trainer v2 looks for."""


CONTAINERS: dict[Kind, str] = {"pytorchjob": "pytorch", "jobset": "pytorch", "trainjob": NODE}
"""The container that runs the agent; the operators look for these names."""


def config_map_of(job: str) -> str:
    return f"{job}-launch"


def state_map_of(job: str) -> str:
    """The ConfigMap to which the leader writes the state of the job."""
    return f"{job}-state"


def secret_of(job: str) -> str:
    return f"{job}-token"


def account_of(job: str) -> str:
    """The name of the pods' account, its Role and RoleBinding, and of the pods' NetworkPolicy."""
    return f"{job}-pods"


def pytorchjob_pods(job: str, pods: int) -> list[str]:
    return [f"{job}-master-0", *(f"{job}-worker-{number}" for number in range(pods - 1))]


def placeholder_of(job: str, host: str) -> str:
    """The placeholder pod on an excluded node."""
    return f"{job}-not-on-{hashlib.sha256(host.encode()).hexdigest()[:8]}"


def leader_host_of(job: str) -> str:
    """The host name of the leader's pod, in a JobSet."""
    return f"{job}-{NODE}-0-0.{job}"


POD_NAMES: Mapping[Kind, str] = {
    "pytorchjob": r"{job}-(master|worker)-\d+",
    "jobset": r"{job}-node-0-\d+-[a-z0-9]{{5}}",
    "trainjob": r"{job}-node-0-\d+-[a-z0-9]{{5}}",
}


def is_pod_of(kind: Kind, job: str, pod: str) -> bool:
    """Whether a pod name belongs to this job, and not to a job whose name has the same prefix. The
    name is all that is known of a deleted pod."""
    return re.fullmatch(POD_NAMES[kind].format(job=re.escape(job)), pod) is not None


def labels_of(launch: LaunchPlan) -> dict[str, str]:
    """Labels of each object of a job. Selectors use JOB_LABEL only."""
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
