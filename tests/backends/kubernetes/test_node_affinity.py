from typing import Any

from orchestrator.backends.kubernetes.node_affinity import not_kept_off, without


def excluded(change: dict[str, Any], replica: str) -> Any:
    pod = change["spec"]["pytorchReplicaSpecs"][replica]["template"]["spec"]
    needed = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    return needed["nodeSelectorTerms"]


def job(terms: list[dict[str, Any]]) -> dict[str, Any]:
    needed = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
    template = {"template": {"spec": {"affinity": {"nodeAffinity": needed}}}}
    return {"spec": {"pytorchReplicaSpecs": {"Master": {"template": {}}, "Worker": template}}}


def test_every_alternative_excludes_the_hosts_and_keeps_its_terms() -> None:
    zone = {"key": "zone", "operator": "In", "values": ["a"]}
    before = {"key": "kubernetes.io/hostname", "operator": "NotIn", "values": ["node-1"]}
    given = job([{"matchExpressions": [zone, before]}, {"matchFields": ["f"]}])
    change = without("pytorchjob", given, ["node-2"])
    both = {"key": "kubernetes.io/hostname", "operator": "NotIn", "values": ["node-1", "node-2"]}
    alone = {**both, "values": ["node-2"]}
    assert excluded(change, "Worker") == [
        {"matchExpressions": [zone, both]},
        {"matchFields": ["f"], "matchExpressions": [alone]},
    ]
    assert excluded(change, "Master") == [{"matchExpressions": [alone]}]


def test_pods_of_a_job_cannot_be_changed() -> None:
    assert without("jobset", {}, ["node-2"]) == {}
    assert without("pytorchjob", job([]), []) == {}
    said = not_kept_off(["node-1", "node-2"])
    assert "no controller excludes node-1, node-2 for new pods of this job" in said
    assert "`kubectl cordon node-1 node-2`" in said
    assert "`kubectl apply -k manifests/controller`" in said
