"""A leader that asks, and a controller that does or does not answer."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, cast

import pytest

from orchestrator.backends.kubernetes.api import Api
from orchestrator.backends.kubernetes.controller.asking import PATIENCE_S, SKEW_S, ask, kept_off
from orchestrator.backends.kubernetes.controller.wish import GangRestart
from orchestrator.backends.kubernetes.refusals import Conflict
from orchestrator.backends.kubernetes.render import names
from orchestrator.backends.kubernetes.resources import LEASES, PODS, Object, Resource
from orchestrator.contract.kubernetes import KubernetesSpec
from tests.backends.kubernetes.controller.world import HOME, Item, job, merge
from tests.backends.kubernetes.rendered import a_launch

NOW = 1_800_000_000.0


@dataclass
class Clock:
    at: float = 0.0

    def now(self) -> float:
        return NOW + self.at

    def monotonic(self) -> float:
        return self.at

    def sleep(self, seconds: float) -> None:
        self.at += seconds


@dataclass
class Cluster:
    """One job, and a controller that suspends it, or makes its placeholders, after so many looks;
    None: never."""

    lease: Item | None
    begins: int | None = None
    job: Any = field(default_factory=lambda: job(notes={names.LAUNCH_ANNOTATION: "1"}))
    looks: int = 0
    merges: int = 0
    late: bool = False
    """It begins at the very moment of the withdrawal."""

    def get(self, resource: Resource, namespace: str, name: str) -> Object | None:
        if resource is LEASES:
            assert (namespace, name) == (HOME, "ndctl-controller")
            return self.lease
        self.looks += 1
        if resource is PODS:
            there = self.begins is not None and self.looks > self.begins
            return {"metadata": {"name": name}} if there else None
        if self.begins is not None and self.looks > self.begins:
            self._suspend()
        return cast("Object", self.job)

    def merge(self, resource: Resource, namespace: str, name: str, change: Object) -> Object:
        self.merges += 1
        if self.late and "resourceVersion" in change["metadata"]:
            self._suspend()
            raise Conflict("it has changed")
        self.job = merge(self.job, change)
        return cast("Object", self.job)

    def _suspend(self) -> None:
        self.job = merge(self.job, {"spec": {"runPolicy": {"suspend": True}}})


def lease(age_s: float = 1.0, holder: str = "pod-1") -> Item:
    said = datetime.fromtimestamp(NOW - age_s, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    spec = {"holderIdentity": holder, "leaseDurationSeconds": 15, "renewTime": said}
    return {"metadata": {"resourceVersion": "1"}, "spec": spec}


def asked(cluster: Cluster) -> bool:
    wish = GangRestart(by="job-master-0", exclude=("node3",))
    return ask(cast("Api", cluster), Clock(), HOME, a_launch(KubernetesSpec()), wish)


def notes(cluster: Cluster) -> Mapping[str, str]:
    found: Mapping[str, str] = cluster.job["metadata"]["annotations"]
    return found


def test_who_answers_is_left_to_it() -> None:
    cluster = Cluster(lease(), begins=3)
    assert asked(cluster)
    assert '"exclude": ["node3"]' in notes(cluster)[names.GANG_ANNOTATION]


@pytest.mark.parametrize("found", [None, lease(holder=""), lease(age_s=16 + SKEW_S)])
def test_nobody_is_asked_where_no_lease_lives(found: Item | None) -> None:
    cluster = Cluster(found)
    assert not asked(cluster)
    assert cluster.merges == 0


def test_the_wish_is_withdrawn_from_who_does_not_answer() -> None:
    cluster = Cluster(lease())
    assert not asked(cluster)
    assert names.GANG_ANNOTATION not in notes(cluster)


def test_who_begins_while_it_is_withdrawn_has_it() -> None:
    cluster = Cluster(lease(), late=True)
    assert asked(cluster)
    assert names.GANG_ANNOTATION in notes(cluster)


def test_a_job_that_nobody_looks_after_is_its_leaders() -> None:
    cluster = Cluster(lease())
    del cluster.job["metadata"]["annotations"][names.CONTROLLER_ANNOTATION]
    assert not asked(cluster)
    cluster.job["metadata"]["annotations"] = {names.CONTROLLER_ANNOTATION: HOME}
    assert not asked(cluster), "it is of another launch"
    assert cluster.merges == 0


@pytest.mark.parametrize(
    ("found", "begins", "keeps", "waits_s"),
    [
        (lease(), 4, True, 2.0),
        (lease(), None, False, 15 + PATIENCE_S),
        (None, 0, False, 0.0),
    ],
    ids=["in a moment", "never", "nobody there"],
)
def test_pods_go_after_what_keeps_their_successors_off(
    found: Item | None, begins: int | None, keeps: bool, waits_s: float
) -> None:
    cluster, clock = Cluster(found, begins=begins), Clock()
    assert kept_off(cast("Api", cluster), clock, HOME, cluster.job, ["node1", "node2"]) is keeps
    assert clock.at == waits_s
