"""Renders the account of a job's pods and its rights. Pure.

It may read, delete pods of this job by name, and write one ConfigMap. It may not change the job or
a runtime, because a pod template can use any account and any Secret of the namespace. For
everything else that recovery needs, pods ask the controller (`controller/pod_requests.py`).

Each process in a pod can use the account. Followers need it too: if the leader is unreachable, one
of them replaces the leader's pod (`leader_recreate.py`).
"""

from collections.abc import Sequence
from typing import Any

from orchestrator.backends.kubernetes.render import names
from orchestrator.backends.kubernetes.render.state_map import reporting_rules
from orchestrator.backends.kubernetes.resources import (
    CONFIG_MAPS,
    EVENTS,
    JOB_KINDS,
    PODS,
    POLICIES,
    ROLES,
    Resource,
)
from orchestrator.contract.launch import LaunchPlan
from orchestrator.contract.spec.kubernetes_spec import KubernetesSpec


def account_objects(
    launch: LaunchPlan, metadata: dict[str, Any], namespace: str
) -> list[dict[str, Any]]:
    """The account, its Role and RoleBinding; empty if the spec names an account. `namespace`: that
    of the account, which the binding must name."""
    spec = launch.kubernetes_spec
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
    job = launch.job
    found = [
        # To find the job's hosts. RBAC cannot limit a list to names.
        _rule([PODS], ["get", "list", "watch"]),
        # To read why a pod waits or was deleted.
        _rule([EVENTS], ["list"]),
        # To see whether the job is still this launch, and whether it is suspended or cancelled.
        _rule([JOB_KINDS[spec.kind].resource], ["get"], [job]),
        # For requests to the controller, and for notes between pods.
        _rule([CONFIG_MAPS], ["get", "patch"], [names.config_map_of(job)]),
    ]
    found += reporting_rules(launch)
    if spec.kind == "pytorchjob":
        # To replace a pod whose host is lost. Other kinds have unpredictable pod names, and a rule
        # without names would allow it for all pods of the namespace.
        found.append(_rule([PODS], ["delete"], names.pytorchjob_pods(job, len(launch.hosts))))
    return found


def _rule(
    resources: Sequence[Resource], verbs: list[str], called: Sequence[str] = ()
) -> dict[str, Any]:
    """`resources` must belong to one API group."""
    rule: dict[str, Any] = {
        "apiGroups": [resources[0].group],
        "resources": [one.plural for one in resources],
        "verbs": verbs,
    }
    return {**rule, "resourceNames": list(called)} if called else rule


def network_policy(launch: LaunchPlan, metadata: dict[str, Any]) -> list[dict[str, Any]]:
    """The policy that pods of the job accept connections only from pods of the job, at all ports.
    Outgoing connections (DNS, API server, storage) are not limited.

    Empty with `host_network`, because policies do not apply to pods in the host's network.
    """
    spec = launch.kubernetes_spec
    if not spec.network_policy or spec.host_network:
        return []
    own = {"matchLabels": {names.JOB_LABEL: launch.job}}
    return [
        {
            "apiVersion": POLICIES.api_version,
            "kind": POLICIES.kind,
            "metadata": {**metadata, "name": names.account_of(launch.job)},
            "spec": {
                "podSelector": own,
                "policyTypes": ["Ingress"],
                "ingress": [{"from": [{"podSelector": own}]}],
            },
        }
    ]
