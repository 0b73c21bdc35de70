"""The account of a job's pods, and what it may do: with this job's own objects alone. Pure.

Two things a Role cannot say. Pods of a JobSet or TrainJob have random names, so the right to delete
pods is of the whole namespace there. And who may patch a job may patch all of it, not its
annotations and affinity alone: docs/kubernetes.md says what follows.
"""

from collections.abc import Sequence
from typing import Any

from orchestrator.backends.kubernetes.render import names
from orchestrator.backends.kubernetes.resources import (
    ACCOUNTS,
    CONFIG_MAPS,
    EVENTS,
    JOB_KINDS,
    PODS,
    ROLE_BINDINGS,
    ROLES,
    RUNTIMES,
    Resource,
)
from orchestrator.contract.kubernetes import KubernetesSpec
from orchestrator.contract.launch import LaunchPlan


def account_objects(
    launch: LaunchPlan, metadata: dict[str, Any], namespace: str
) -> list[dict[str, Any]]:
    """The account, its Role and the binding of both; none where the spec names an account.
    `namespace`: where the account will be, which the binding has to say."""
    spec = launch.kubernetes or KubernetesSpec()
    if spec.service_account is not None:
        return []
    named = {**metadata, "name": names.account_of(launch.job)}
    group = ROLES.group
    subject = {"kind": "ServiceAccount", "name": named["name"], "namespace": namespace}
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": named},
        {
            "apiVersion": f"{group}/v1",
            "kind": "Role",
            "metadata": named,
            "rules": rules(launch, spec),
        },
        {
            "apiVersion": f"{group}/v1",
            "kind": "RoleBinding",
            "metadata": named,
            "roleRef": {"apiGroup": group, "kind": "Role", "name": named["name"]},
            "subjects": [subject],
        },
    ]


def rules(launch: LaunchPlan, spec: KubernetesSpec) -> list[dict[str, Any]]:
    job, own = launch.job, names.account_of(launch.job)
    found = [
        # Which hosts the job has; a list cannot be limited to names.
        _rule([PODS], ["get", "list", "watch"]),
        # Why a pod waits, or went.
        _rule([EVENTS], ["list"]),
        # To leave a bad host out; to write down who cancelled.
        _rule([JOB_KINDS[spec.kind].resource], ["get", "patch"], [job]),
        # To make the job the owner of what is beside it, so that all goes with it.
        _rule([CONFIG_MAPS], ["get", "patch"], [names.config_map_of(job)]),
        _rule([ACCOUNTS], ["get", "patch"], [own]),
        _rule([ROLES, ROLE_BINDINGS], ["get", "patch"], [own]),
    ]
    if spec.kind == "trainjob":
        found.append(_rule([RUNTIMES], ["get", "patch"], [job]))
    # To have a pod made anew whose host is lost.
    if spec.kind == "pytorchjob":
        found.append(_rule([PODS], ["delete"], names.pytorchjob_pods(job, len(launch.hosts))))
    else:
        found.append(_rule([PODS], ["delete"]))
        # To say of a pod that it has failed, whose node does not answer.
        found.append(_rule([PODS], ["patch"], sub="status"))
    return found


def _rule(
    resources: Sequence[Resource], verbs: list[str], called: Sequence[str] = (), sub: str = ""
) -> dict[str, Any]:
    """`resources`: of one group."""
    rule: dict[str, Any] = {
        "apiGroups": [resources[0].group],
        "resources": [one.plural + (f"/{sub}" if sub else "") for one in resources],
        "verbs": verbs,
    }
    return {**rule, "resourceNames": list(called)} if called else rule
