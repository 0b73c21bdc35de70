"""Rules about other pods of a job, by labels that ndctl's pods do not have."""

from typing import Any

import pytest
import yaml

from orchestrator.backends.kubernetes.render.names import labels_of_job
from orchestrator.specs.foreign.carried import Carried
from orchestrator.specs.foreign.pods.from_pods import BY_NDCTL_ALWAYS
from tests.specs.foreign.test_manifests import manifest, taken

REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"
ZONE, RACK, HOSTNAME = "topology.kubernetes.io/zone", "rack", "kubernetes.io/hostname"


def with_rules(kind: str, **fields: Any) -> Carried:
    """A job with the name `big.run`, and the labels `team: a` and `role: rank` on its pods."""
    one = yaml.safe_load(manifest(kind))
    spec = one["spec"]
    template = {
        "Job": lambda: spec["template"],
        "JobSet": lambda: spec["replicatedJobs"][0]["template"]["spec"]["template"],
        "PyTorchJob": lambda: spec["pytorchReplicaSpecs"]["Worker"]["template"],
        "volcano": lambda: spec["tasks"][0]["template"],
        "LeaderWorkerSet": lambda: spec["leaderWorkerTemplate"]["workerTemplate"],
    }[kind]()
    labels = {"role": "rank", "app.kubernetes.io/name": "llm"}
    template["metadata"] = {"labels": labels}
    template["spec"] |= fields
    return taken(yaml.safe_dump(one))


def term(key: str, **labels: str) -> dict[str, Any]:
    return {"topologyKey": key, "labelSelector": {"matchLabels": labels}}


def template_of(carried: Carried) -> Any:
    return carried.cluster["kubernetes"]["pod_template"]["spec"]


@pytest.mark.parametrize(
    ("kind", "labels"),
    [
        ("Job", {"job-name": "big.run"}),
        ("Job", {"batch.kubernetes.io/controller-uid": "7f1c"}),
        ("JobSet", {"jobset.sigs.k8s.io/jobset-name": "big.run", "role": "rank"}),
        ("JobSet", {"batch.kubernetes.io/job-name": "big.run-workers-0"}),
        ("PyTorchJob", {"training.kubeflow.org/job-name": "big.run"}),
        ("PyTorchJob", {"pytorch-job-name": "big.run", "replica-type": "worker"}),
        ("volcano", {"volcano.sh/job-name": "big.run"}),
        ("LeaderWorkerSet", {"leaderworkerset.sigs.k8s.io/name": "big.run"}),
        ("Job", {"app.kubernetes.io/name": "llm"}),
    ],
)
def test_pods_of_this_job_are_asked_for_by_a_key(kind: str, labels: dict[str, str]) -> None:
    near = {REQUIRED: [term(ZONE, **labels)]}
    near[PREFERRED] = [{"weight": 5, "podAffinityTerm": term(RACK, **labels)}]
    carried = with_rules(kind, affinity={"podAffinity": near})
    asked = carried.cluster["kubernetes"]["topology"]
    assert asked == {"required": ZONE, "levels": [RACK]}
    assert "affinity" not in template_of(carried)


def test_a_preference_stays_a_preference() -> None:
    own = {"job-name": "big.run"}
    terms = [{"weight": 9, "podAffinityTerm": term(RACK, **own)}]
    terms += [{"weight": 1, "podAffinityTerm": term(ZONE, **own)}]
    carried = with_rules("Job", affinity={"podAffinity": {PREFERRED: terms}})
    assert carried.cluster["kubernetes"]["topology"] == {"preferred": RACK, "levels": [ZONE]}


@pytest.mark.parametrize(
    "selector",
    [
        {"matchLabels": {"job-name": "other"}},
        {"matchLabels": {"role": "rank"}},
        {"matchLabels": {"app": "db"}},
        {"matchExpressions": [{"key": "job-name", "operator": "NotIn", "values": ["big.run"]}]},
    ],
)
@pytest.mark.parametrize("rule", ["podAffinity", "podAntiAffinity"])
def test_rules_that_still_select_the_same_pods_stay(rule: str, selector: Any) -> None:
    affinity = {rule: {REQUIRED: [{"topologyKey": ZONE, "labelSelector": selector}]}}
    carried = with_rules("Job", affinity=affinity)
    assert template_of(carried)["affinity"] == affinity
    assert "topology" not in carried.cluster["kubernetes"]
    replaced = [one for one in carried.before if one.startswith("check podAntiAffinity")]
    assert bool(replaced) == (rule == "podAntiAffinity")


def test_one_pod_on_each_node_is_ndctls_own_rule() -> None:
    apart = {"podAntiAffinity": {REQUIRED: [term(HOSTNAME, **{"job-name": "big.run"})]}}
    carried = with_rules("Job", affinity=apart)
    assert "affinity" not in template_of(carried)
    assert "Affinity" not in str(carried.left)


def test_a_rule_without_a_key_is_said() -> None:
    own = {"job-name": "big.run"}
    affinity = {
        "podAffinity": {REQUIRED: [term(HOSTNAME, **own)]},
        "podAntiAffinity": {REQUIRED: [term(RACK, **own)]},
    }
    spread = [term(RACK, **own), term(HOSTNAME, **own), term(RACK, role="rank")]
    carried = with_rules("Job", affinity=affinity, topologySpreadConstraints=spread)
    said = "\n".join(carried.left)
    assert "podAffinity over kubernetes.io/hostname, of the job's own pods" in said
    assert "podAntiAffinity over rack, of the job's own pods" in said
    assert "topologySpreadConstraints over rack: pods of ndctl have other labels" in said
    assert template_of(carried)["topologySpreadConstraints"] == [spread[2]]


def test_all_jobs_stay_apart() -> None:
    every = [{"key": "job-name", "operator": "Exists"}]
    apart = {"topologyKey": HOSTNAME, "labelSelector": {"matchExpressions": every}}
    carried = with_rules("Job", affinity={"podAntiAffinity": {REQUIRED: [apart]}})
    assert template_of(carried)["affinity"] == {"podAntiAffinity": {REQUIRED: [apart]}}


def test_keys_of_the_pod_itself_name_the_job() -> None:
    near = {"topologyKey": ZONE, "labelSelector": {"matchLabels": {"role": "rank"}}}
    near["matchLabelKeys"] = ["job-name"]
    carried = with_rules("Job", affinity={"podAffinity": {REQUIRED: [near]}})
    assert carried.cluster["kubernetes"]["topology"] == {"required": ZONE}


def test_labels_that_ndctl_sets_are_left_out_and_said() -> None:
    carried = with_rules("Job")
    assert carried.cluster["kubernetes"]["labels"] == {"role": "rank", "team": "a"}
    assert "the label app.kubernetes.io/name: llm: ndctl sets it itself" in carried.left
    assert all(map(BY_NDCTL_ALWAYS.fullmatch, labels_of_job("a")))
