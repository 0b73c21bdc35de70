"""The account of a job's pods, and what it may do: read, delete pods of this job by name, and write
one ConfigMap that nothing is made from. Pure.

It may change neither the job nor a runtime: they hold the template of pods, and a template names
any account and any Secret of the namespace. What recovery needs beyond this the controller does,
where there is one (`controller/pod_requests.py`).

Every process in a pod can use the account. Followers need it as well as the leader: where no leader
is heard, one of them has its pod made again (`leader_recreate.py`).
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
    job = launch.job
    found = [
        # Which hosts the job has; a list cannot be limited to names.
        _rule([PODS], ["get", "list", "watch"]),
        # To read why a pod waits or was deleted.
        _rule([EVENTS], ["list"]),
        # Whether it is still this launch, is suspended, was cancelled.
        _rule([JOB_KINDS[spec.kind].resource], ["get"], [job]),
        # What is asked of the controller, and what pods note for each other.
        _rule([CONFIG_MAPS], ["get", "patch"], [names.config_map_of(job)]),
    ]
    found += reporting_rules(launch)
    if spec.kind == "pytorchjob":
        # To have a pod made again whose host is lost. Of the other kinds no name is known
        # beforehand, and a rule without names would be for every pod of the namespace.
        found.append(_rule([PODS], ["delete"], names.pytorchjob_pods(job, len(launch.hosts))))
    return found


def _rule(
    resources: Sequence[Resource], verbs: list[str], called: Sequence[str] = ()
) -> dict[str, Any]:
    """`resources`: of one group."""
    rule: dict[str, Any] = {
        "apiGroups": [resources[0].group],
        "resources": [one.plural for one in resources],
        "verbs": verbs,
    }
    return {**rule, "resourceNames": list(called)} if called else rule


def network_policy(launch: LaunchPlan, metadata: dict[str, Any]) -> list[dict[str, Any]]:
    """Pods of the job accept connections from pods of this job, at every port, and from nothing
    else. What they connect to themselves is not limited: names, the API server, a data store.

    None with `host_network`: a policy says nothing of pods that have the network of their host.
    """
    spec = launch.kubernetes or KubernetesSpec()
    if not spec.network_policy or spec.host_network:
        return []
    own = {"matchLabels": {names.JOB_LABEL: launch.job}}
    return [
        {
            "apiVersion": f"{POLICIES.group}/{POLICIES.version}",
            "kind": POLICIES.kind,
            "metadata": {**metadata, "name": names.account_of(launch.job)},
            "spec": {
                "podSelector": own,
                "policyTypes": ["Ingress"],
                "ingress": [{"from": [{"podSelector": own}]}],
            },
        }
    ]
