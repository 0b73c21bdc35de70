"""Rules of another tool's pods about where other pods of the job are.

Such a rule often selects by a label that the tool's controller sets. Pods of ndctl have other
labels, so a copy of the rule would match no pod, and a required one would keep the job pending.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from msgspec import Struct

from orchestrator.inventory.kubernetes.selectors import Requirement, requirements
from orchestrator.specs.foreign.carried import Carried, braced
from orchestrator.specs.foreign.pods.manifests import at

REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"
SAME = "Same"
"""An operator of `matchLabelKeys`: pods with the value of the pod itself."""
HOSTNAME = "kubernetes.io/hostname"
BY_CONTROLLERS = re.compile(
    r"(.*\.)?(batch\.kubernetes\.io|(jobset|leaderworkerset)\.sigs\.k8s\.io|kubeflow\.org|ray\.io"
    r"|volcano\.sh|sagemaker\.amazonaws\.com)/.*"
    r"|((pytorch|mpi)-)?(job-name|job-role|replica-type|replica-index)"
    r"|controller-uid|controller-name|group-name"
)
"""Labels of pods that a controller sets: of Jobs, JobSet, LeaderWorkerSet, Kubeflow, Ray, Volcano
and HyperPod."""
NAMES = re.compile(r"(.*/|\w+-)?(job-name|jobset-name|name|cluster)")
"""Those of them whose value begins with the name of the job."""
IDS = re.compile(r"(.*/)?(controller-uid|jobset-uid|job-key|group-key)")
"""Those whose value is an id that a server gave to the job."""


class OwnPods(Struct, frozen=True, kw_only=True):
    """What is known of the labels of a job's pods."""

    name: str
    """The job's name in the manifest."""
    before: Mapping[str, str]
    """Labels of the manifest's pod template."""
    now: Mapping[str, str]
    """Labels of the job's pods in ndctl."""

    def lost(self, term: Any) -> list[Requirement]:
        """Requirements that only the manifest's pods met; none if they did not meet all."""
        asked = [*_asked(term)]
        if at(term, "namespaces") or at(term, "namespaceSelector"):
            return []
        if not all(self._met_before(one) for one in asked):
            return []
        return [one for one in asked if not one.admits(self.now)]

    def _met_before(self, one: Requirement) -> bool:
        if one.key in self.before or not BY_CONTROLLERS.fullmatch(one.key):
            return one.admits(self.before)
        if one.operator == "In" and one.values and NAMES.fullmatch(one.key):
            return any(_begins(value, self.name) for value in one.values)
        # `NotIn` with ids means other jobs.
        return one.operator in ("In", "Exists", SAME)

    def is_meant(self, lost: list[Requirement]) -> bool:
        """Whether the requirements are those of this job, and of no other."""
        return any(
            one.operator in ("In", SAME)
            and (one.key in self.before or NAMES.fullmatch(one.key) or IDS.fullmatch(one.key))
            for one in lost
        )


def _asked(term: Any) -> Iterator[Requirement]:
    yield from requirements(at(term, "labelSelector"))
    same = at(term, "matchLabelKeys")
    for key in same if isinstance(same, list) else ():
        yield Requirement(str(key), SAME)


def _begins(value: str, name: str) -> bool:
    """`fit-workers-0` is a child Job of the JobSet `fit`, and `fit-x2v9k` a cluster of Ray."""
    return value == name or value.startswith(f"{name.rstrip('-')}-")


def without_own_rules(
    carried: Carried, kubernetes: dict[str, Any], pod: Mapping[str, Any], own: OwnPods
) -> dict[str, Any]:
    """`pod` without rules about the job's own pods that a copy would break. What a spec has a key
    for is in `kubernetes` then, and the rest is noted."""
    found = dict(pod)
    affinity = pod.get("affinity")
    if isinstance(affinity, Mapping):
        kept = {key: value for key, value in affinity.items() if key not in RULES}
        for what in RULES:
            if what in affinity:
                rules = _without_own(carried, kubernetes, what, affinity[what], own)
                kept |= {what: rules} if rules or not affinity[what] else {}
        found["affinity"] = kept
        if affinity and not kept:
            del found["affinity"]
    if spread := pod.get("topologySpreadConstraints"):
        found["topologySpreadConstraints"] = _spread(carried, spread, own)
        if not found["topologySpreadConstraints"]:
            del found["topologySpreadConstraints"]
    return found


RULES = ("podAffinity", "podAntiAffinity")


def _without_own(
    carried: Carried, kubernetes: dict[str, Any], what: str, rules: Any, own: OwnPods
) -> Any:
    if not isinstance(rules, Mapping):
        return rules
    left = dict(rules)
    near: dict[str, list[tuple[int, str]]] = {REQUIRED: [], PREFERRED: []}
    for when in near:
        terms = rules.get(when)
        kept = []
        for one in terms if isinstance(terms, list) else ():
            term = at(one, "podAffinityTerm") if when == PREFERRED else one
            key, lost = braced(str(at(term, "topologyKey"))), own.lost(term)
            if not lost or (what == "podAntiAffinity" and not own.is_meant(lost)):
                kept.append(one)
            elif what == "podAffinity" and key != HOSTNAME:
                near[when].append((_weight(one), key))
            elif what == "podAffinity" or key != HOSTNAME:
                carried.leave(f"{what} over {key}, of the job's own pods: {ON_HOSTS}")
        if isinstance(terms, list):
            left[when] = kept
            if not kept:
                del left[when]
    _set_near(carried, kubernetes, near)
    if what == "podAntiAffinity" and left.get(REQUIRED):
        carried.before.append(
            "check podAntiAffinity in pod_template: it replaces ndctl's own rule, by which no node"
            " has two pods of the job"
        )
    return left


ON_HOSTS = "ndctl runs one pod on each node, and has no other rule about their distance"


def _weight(term: Any) -> int:
    weight = at(term, "weight")
    return weight if isinstance(weight, int) else 0


def _set_near(
    carried: Carried, kubernetes: dict[str, Any], near: Mapping[str, list[tuple[int, str]]]
) -> None:
    hard = [*dict.fromkeys(key for _, key in near[REQUIRED])]
    soft = [*dict.fromkeys(key for _, key in sorted(near[PREFERRED], reverse=True))]
    topology: dict[str, Any] = {}
    if hard:
        topology["required"] = hard[0]
    elif soft:
        topology["preferred"] = soft.pop(0)
    if soft:
        topology["levels"] = soft[::-1]
    for key in hard[1:]:
        carried.leave(f"podAffinity over {key}: cluster.kubernetes.topology requires {hard[0]}")
    if topology:
        kubernetes["topology"] = topology


def _spread(carried: Carried, given: list[Any], own: OwnPods) -> list[Any]:
    kept = []
    for one in given:
        key = at(one, "topologyKey")
        if not own.lost(one):
            kept.append(one)
        elif key != HOSTNAME:  # ndctl runs one pod on each node
            carried.leave(
                f"topologySpreadConstraints over {key}: pods of ndctl have other labels; to keep"
                " it, add it to cluster.kubernetes.pod_template with the label ndctl.dev/job"
            )
    return kept
