"""Renders the pod template of a job. Pure."""

import math
import re
from collections.abc import Mapping
from typing import Any

from orchestrator.backends.kubernetes.render import names
from orchestrator.backends.kubernetes.render.patch import merged
from orchestrator.backends.kubernetes.render.topology import affinity, queue_annotations
from orchestrator.contract.files import env
from orchestrator.contract.launch import LaunchPlan
from orchestrator.contract.spec.kubernetes_spec import (
    EnvFrom,
    KubernetesSpec,
    MountedVolume,
    Toleration,
    ValueFrom,
)
from orchestrator.contract.submission_payload import Handover
from orchestrator.inventory.kubernetes.taints import tolerations_of

HANDOVER_DIR = "/etc/ndctl/submission"
"""Mount path of the job's ConfigMap."""
TASK = "orchestrator.backends.entry.pod_start"
GRACE_SLACK_S = 15
"""Additional grace period for the leader to record the end of the job, after the ranks' own."""
DOWNWARD: Mapping[str, str] = {
    "NDCTL_NODE_NAME": "spec.nodeName",
    "NDCTL_POD_NAME": "metadata.name",
    "NDCTL_POD_NAMESPACE": "metadata.namespace",
    "NDCTL_POD_IP": "status.podIP",
    "NDCTL_POD_UID": "metadata.uid",
}
"""Environment from the downward API."""
KEPT_RUNNING: Mapping[str, str] = {
    "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
    "karpenter.sh/do-not-disrupt": "true",
}
"""Without these, autoscalers would drain a node to save cost. A drained pod saves a checkpoint and
exits, but all other pods of the job wait for its successor. There is no PodDisruptionBudget,
because it would block each drain as long as the job trains, while a drain costs only a
checkpoint."""
FORCE_S = KubernetesSpec().force_delete_after
CONTAINER_LISTS = ("initContainers", "containers")
CONTAINER_SECURITY: Mapping[str, Any] = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
}
SYS_ADMIN = "CAP_SYS_ADMIN"
REFERENCE = re.compile(r"\$\$|\$\(([^)]+)\)")
"""`$(NAME)` in the value of a variable; `$$` is a dollar sign."""
RDMA_CAPABILITY = "IPC_LOCK"
"""RDMA pins memory, which needs this capability."""


def pod_template(handover: Handover, environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The pod template with additional `environ`, and with the user's patch applied. All
    containers, also the user's own, get the security context unless the patch overrides it."""
    launch, spec = handover.launch, handover.launch.kubernetes_spec
    template = {
        "metadata": {
            "labels": {**spec.labels, **names.labels_of(launch)},
            "annotations": {
                **KEPT_RUNNING,
                **spec.annotations,
                **queue_annotations(spec),
                names.LAUNCH_ANNOTATION: str(launch.launch),
                **_force(spec),
            },
        },
        "spec": {
            "serviceAccountName": spec.service_account or names.account_of(launch.job),
            **_given("priorityClassName", spec.priority_class),
            **_given("imagePullSecrets", [{"name": name} for name in spec.image_pull_secrets]),
            **_network(spec),
            **_given("nodeSelector", dict(spec.node_selector)),
            **_given("tolerations", [_toleration(one) for one in tolerations_of(spec)]),
            "affinity": affinity(launch, spec),
            "terminationGracePeriodSeconds": math.ceil(handover.job.stop_grace) + GRACE_SLACK_S,
            "securityContext": _pod_security(spec),
            "containers": [_container(launch, spec, environ or {})],
            "volumes": _volumes(launch, spec),
        },
    }
    return _in_order(_secured(merged(template, spec.pod_template)))


def _force(spec: KubernetesSpec) -> dict[str, str]:
    """The controller does not read the spec, but it knows the default."""
    after = spec.force_delete_after
    return {} if after == FORCE_S else {names.FORCE_ANNOTATION: f"{after:g}"}


def _given(key: str, value: Any) -> dict[str, Any]:
    return {key: value} if value else {}


def _network(spec: KubernetesSpec) -> dict[str, Any]:
    # Without this DNS policy, a pod in the host's network could not resolve service names.
    return (
        {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"} if spec.host_network else {}
    )


def _toleration(one: Toleration) -> dict[str, Any]:
    return {
        **_given("key", one.key),
        "operator": one.operator,
        **_given("value", one.value),
        **_given("effect", one.effect),
        **({} if one.toleration_seconds is None else {"tolerationSeconds": one.toleration_seconds}),
    }


def _pod_security(spec: KubernetesSpec) -> dict[str, Any]:
    return {
        "runAsNonRoot": True,
        "runAsUser": spec.run_as_user,
        "runAsGroup": spec.run_as_group,
        "fsGroup": spec.run_as_group,
        # A run volume may have millions of files, so do not check the group of each one.
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def _secured(template: dict[str, Any]) -> dict[str, Any]:
    pod = template["spec"]
    secured = {key: [_safe(one) for one in pod[key]] for key in CONTAINER_LISTS if key in pod}
    return {**template, "spec": {**pod, **secured}}


def _safe(container: Mapping[str, Any]) -> dict[str, Any]:
    said = container.get("securityContext", {})
    usual = dict(CONTAINER_SECURITY)
    # The API server refuses pods that forbid an escalation and have these.
    if said.get("privileged") or SYS_ADMIN in said.get("capabilities", {}).get("add", ()):
        del usual["allowPrivilegeEscalation"]
    return {**container, "securityContext": merged(usual, said)}


def _in_order(template: dict[str, Any]) -> dict[str, Any]:
    """`template` with each variable after those that its value refers to. Kubernetes replaces
    `$(NAME)` only by an earlier variable, and those of the patch were appended."""
    pod = template["spec"]
    containers = [
        {**one, "env": _after_their_references(one["env"])} if "env" in one else one
        for one in pod["containers"]
    ]
    return {**template, "spec": {**pod, "containers": containers}}


def _after_their_references(variables: list[dict[str, Any]]) -> list[dict[str, Any]]:
    waiting, ordered = [*variables], []
    while waiting:
        names = {one.get("name") for one in waiting}
        free = (one for one in waiting if not names & _references(one))
        one = next(free, waiting[0])  # those that refer to each other keep their order
        waiting.remove(one)
        ordered.append(one)
    return ordered


def _references(variable: Mapping[str, Any]) -> set[str]:
    return {*REFERENCE.findall(str(variable.get("value", "")))} - {"", variable.get("name")}


def _container(
    launch: LaunchPlan, spec: KubernetesSpec, environ: Mapping[str, str]
) -> dict[str, Any]:
    return {
        "name": names.CONTAINERS[spec.kind],
        **_given("image", spec.image),
        **_given("imagePullPolicy", spec.image_pull_policy),
        "command": [spec.python, "-P", "-u", "-m", TASK],
        **_given("envFrom", [_env_from(one) for one in spec.env_from]),
        "env": _environ(launch, spec, environ),
        **_given("resources", _resources(launch, spec)),
        "securityContext": _container_security(spec),
        # `ndctl status` shows the end of a failed pod's log.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": _mounts(spec),
    }


def _environ(
    launch: LaunchPlan, spec: KubernetesSpec, environ: Mapping[str, str]
) -> list[dict[str, Any]]:
    token = {"name": names.secret_of(launch.job), "key": names.TOKEN_KEY, "optional": True}
    said: dict[str, str | ValueFrom] = {
        **environ,
        names.KIND_VARIABLE: spec.kind,
        env.SUBMISSION: HANDOVER_DIR,
        env.RUN_ROOT: spec.run_root,
        **spec.env,
    }
    return [
        *(
            {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
            for name, path in DOWNWARD.items()
        ),
        {"name": env.TOKEN, "valueFrom": {"secretKeyRef": token}},
        *(_variable(name, value) for name, value in said.items()),
    ]


def _variable(name: str, value: str | ValueFrom) -> dict[str, Any]:
    if isinstance(value, str):
        return {"name": name, "value": value}
    if value.secret is not None:
        source = {"secretKeyRef": {"name": value.secret, "key": value.key}}
    else:
        source = {"configMapKeyRef": {"name": str(value.config_map), "key": value.key}}
    return {"name": name, "valueFrom": source}


def _env_from(one: EnvFrom) -> dict[str, Any]:
    prefix = _given("prefix", one.prefix)
    if one.secret is not None:
        return {**prefix, "secretRef": {"name": one.secret}}
    return {**prefix, "configMapRef": {"name": one.config_map}}


def _resources(launch: LaunchPlan, spec: KubernetesSpec) -> dict[str, Any]:
    devices: dict[str, str] = {}
    if spec.gpu_resource is not None:
        devices[spec.gpu_resource] = str(launch.devices_per_host)
    if spec.rdma_resource is not None:
        devices[spec.rdma_resource] = str(spec.rdma_count)
    cpu, memory = _given("cpu", spec.cpu), _given("memory", spec.memory)
    return {
        **_given("requests", {**cpu, **memory, **devices}),
        **_given("limits", {**(cpu if spec.guaranteed else {}), **memory, **devices}),
    }


def _container_security(spec: KubernetesSpec) -> dict[str, Any]:
    """Without what `_safe` adds to each container."""
    return {"capabilities": {"add": [RDMA_CAPABILITY]}} if spec.rdma_resource is not None else {}


def _mounts(spec: KubernetesSpec) -> list[dict[str, Any]]:
    shm = [{"name": "shm", "mountPath": "/dev/shm"}] if spec.shm is not None else []
    return [
        {"name": "submission", "mountPath": HANDOVER_DIR, "readOnly": True},
        {"name": "runs", "mountPath": spec.run_root},
        *shm,
        *(
            {
                "name": one.name,
                "mountPath": one.mount_path,
                **_given("readOnly", one.read_only and one.empty_dir is None),
            }
            for one in spec.volumes
        ),
    ]


def _volumes(launch: LaunchPlan, spec: KubernetesSpec) -> list[dict[str, Any]]:
    runs = MountedVolume(
        name="runs",
        mount_path=spec.run_root,
        claim=spec.runs.claim,
        host_path=spec.runs.host_path,
        read_only=False,
    )
    memory = {"emptyDir": {"medium": "Memory", **_given("sizeLimit", spec.shm)}}
    return [
        {"name": "submission", "configMap": {"name": names.config_map_of(launch.job)}},
        _volume(runs),
        *([{"name": "shm", **memory}] if spec.shm is not None else []),
        *(_volume(one) for one in spec.volumes),
    ]


def _volume(one: MountedVolume) -> dict[str, Any]:
    return {"name": one.name, **_source(one)}


def _source(one: MountedVolume) -> dict[str, Any]:
    if one.claim is not None:
        claim = {"claimName": one.claim, **_given("readOnly", one.read_only)}
        return {"persistentVolumeClaim": claim}
    if one.host_path is not None:
        return {"hostPath": {"path": one.host_path, "type": "Directory"}}
    if one.secret is not None:
        return {"secret": {"secretName": one.secret}}
    if one.config_map is not None:
        return {"configMap": {"name": one.config_map}}
    return {"emptyDir": {"sizeLimit": one.empty_dir}}
