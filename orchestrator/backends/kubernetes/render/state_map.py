"""The ConfigMap in which a job's leader says how the job stands, and its rights for that and for
events. Pure.

Rendered without keys: whoever applies the text again takes nothing away that a leader wrote.
"""

from typing import Any

from orchestrator.backends.kubernetes.render import names
from orchestrator.backends.kubernetes.resources import CONFIG_MAPS, EVENTS, JOB_KINDS
from orchestrator.contract.launch import LaunchPlan
from orchestrator.contract.spec.kubernetes_spec import KubernetesSpec


def state_map(launch: LaunchPlan, metadata: dict[str, Any]) -> dict[str, Any]:
    labels = {**metadata["labels"], names.HOLDS_LABEL: "state"}
    named = {"name": names.state_map_of(launch.job), **metadata, "labels": labels}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": named}


def reporting_rules(launch: LaunchPlan) -> list[dict[str, Any]]:
    """A Role cannot say which event is made; that of the ConfigMap is for this one alone."""
    kind = JOB_KINDS[(launch.kubernetes or KubernetesSpec()).kind].resource
    return [
        # To be told when the job is deleted, which takes this Role away.
        {
            "apiGroups": [kind.group],
            "resources": [kind.plural],
            "resourceNames": [launch.job],
            "verbs": ["watch"],
        },
        # How the job stands.
        {
            "apiGroups": [CONFIG_MAPS.group],
            "resources": [CONFIG_MAPS.plural],
            "resourceNames": [names.state_map_of(launch.job)],
            "verbs": ["patch"],
        },
        # What happened to it.
        {"apiGroups": [EVENTS.group], "resources": [EVENTS.plural], "verbs": ["create"]},
    ]
