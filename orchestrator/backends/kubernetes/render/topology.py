"""Renders node affinity and topology of the pods of a job. Pure.

With Kueue, annotations request the topology, and Kueue places the job as a whole. Without Kueue,
the scheduler places one pod after the other and uses only affinity.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator.backends.kubernetes.render import names
from orchestrator.contract.launch import LaunchPlan
from orchestrator.contract.spec.kubernetes_spec import Kind, KubernetesSpec, TopologyRequest

HOSTNAME = "kubernetes.io/hostname"
KUEUE = "kueue.x-k8s.io"
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"
CHANGEABLE: tuple[Kind, ...] = ("pytorchjob",)
"""Kinds whose pod template can change, so that new pods can exclude nodes. That of a Job is
fixed."""
STRONGLY = 100
"""The largest weight of a preference."""


def queue_annotations(spec: KubernetesSpec) -> dict[str, str]:
    """Annotations of a pod template for Kueue's topology-aware scheduling."""
    asks = spec.topology
    if spec.queue is None or asks is None:
        return {}
    whole = asks.required or asks.preferred
    said = {
        "podset-required-topology": asks.required,
        "podset-preferred-topology": asks.preferred,
        "podset-slice-required-topology": asks.slice,
        "podset-slice-size": None if asks.slice_size is None else str(asks.slice_size),
        # For Kueue, Master and Worker are two pod sets; the group keeps them together.
        "podset-group-name": "hosts" if whole and spec.kind == "pytorchjob" else None,
    }
    return {f"{KUEUE}/{key}": value for key, value in said.items() if value is not None}


def affinity(launch: LaunchPlan, spec: KubernetesSpec) -> dict[str, Any]:
    own = {"matchLabels": {names.JOB_LABEL: launch.job}}
    nodes = node_affinity(spec, launch.exclude)
    near = _near(spec.topology, own) if spec.topology and spec.queue is None else {}
    return {
        **({"nodeAffinity": nodes} if nodes else {}),
        **({"podAffinity": near} if near else {}),
        "podAntiAffinity": {REQUIRED: _apart(launch.job, spec.kind)},
    }


def _apart(job: str, kind: Kind) -> list[dict[str, Any]]:
    """At most one pod per node; for kinds with a fixed template, none beside a placeholder."""
    labels = [names.JOB_LABEL, *([] if kind in CHANGEABLE else [names.KEEPS_OFF_LABEL])]
    return [
        {"labelSelector": {"matchLabels": {label: job}}, "topologyKey": HOSTNAME}
        for label in labels
    ]


def node_affinity(spec: KubernetesSpec, exclude: Sequence[str]) -> dict[str, Any]:
    """Required and preferred nodes, without the spec's excluded hosts and `exclude`."""
    asks = spec.topology or TopologyRequest()
    left_out = sorted({*spec.exclude, *exclude})
    hard = _among(asks.nodes)
    if left_out:
        hard.append({"key": HOSTNAME, "operator": "NotIn", "values": left_out})
    soft = [
        {"weight": STRONGLY, "preference": {"matchExpressions": [one]}}
        for one in _among(asks.prefer_nodes)
    ]
    return {
        **({REQUIRED: {"nodeSelectorTerms": [{"matchExpressions": hard}]}} if hard else {}),
        **({PREFERRED: soft} if soft else {}),
    }


def _among(labels: Mapping[str, Sequence[str]]) -> list[dict[str, Any]]:
    return [
        {"key": key, "operator": "In", "values": list(values)} for key, values in labels.items()
    ]


def _near(asks: TopologyRequest, own: dict[str, Any]) -> dict[str, Any]:
    hard = [asks.required] if asks.required else []
    # The innermost level has the largest weight, because it implies the outer ones.
    wanted = dict.fromkeys(filter(None, (asks.preferred, *reversed(asks.levels))))
    soft = [
        {
            "weight": max(STRONGLY >> depth, 1),
            "podAffinityTerm": {"labelSelector": own, "topologyKey": label},
        }
        for depth, label in enumerate(wanted)
    ]
    return {
        **(
            {REQUIRED: [{"labelSelector": own, "topologyKey": label} for label in hard]}
            if hard
            else {}
        ),
        **({PREFERRED: soft} if soft else {}),
    }
