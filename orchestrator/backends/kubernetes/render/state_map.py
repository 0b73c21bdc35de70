"""Renders the ConfigMap for the state of the job, and the leader's rights to write it and to create
events. Pure.

The ConfigMap is rendered without data, so that a repeated apply does not remove what a leader
wrote.
"""

from typing import Any

from orchestrator.backends.kubernetes.render import names
from orchestrator.backends.kubernetes.resources import CONFIG_MAPS, EVENTS, JOB_KINDS
from orchestrator.contract.launch import LaunchPlan


def state_map(launch: LaunchPlan, metadata: dict[str, Any]) -> dict[str, Any]:
    labels = {**metadata["labels"], names.HOLDS_LABEL: "state"}
    named = {"name": names.state_map_of(launch.job), **metadata, "labels": labels}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": named}


def reporting_rules(launch: LaunchPlan) -> list[dict[str, Any]]:
    """A Role cannot limit which events may be created. The rule for the ConfigMap names this
    one."""
    kind = JOB_KINDS[launch.kubernetes_spec.kind].resource
    return [
        # To notice the deletion of the job, which also deletes this Role.
        {
            "apiGroups": [kind.group],
            "resources": [kind.plural],
            "resourceNames": [launch.job],
            "verbs": ["watch"],
        },
        # To write the state of the job.
        {
            "apiGroups": [CONFIG_MAPS.group],
            "resources": [CONFIG_MAPS.plural],
            "resourceNames": [names.state_map_of(launch.job)],
            "verbs": ["patch"],
        },
        # To create events about the job.
        {"apiGroups": [EVENTS.group], "resources": [EVENTS.plural], "verbs": ["create"]},
    ]
