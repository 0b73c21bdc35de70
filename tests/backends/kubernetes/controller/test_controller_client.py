"""Requests of a leader to the controller, with and without an answer."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, cast

import pytest

from orchestrator.backends.kubernetes.api.api_errors import Conflict
from orchestrator.backends.kubernetes.api.client import Api, Listed
from orchestrator.backends.kubernetes.controller.controller_client import (
    PATIENCE_S,
    SKEW_S,
    TRIES,
    ask,
    avoid,
    end,
    kept_off,
    note,
    restarts_of,
)
from orchestrator.backends.kubernetes.controller.pod_requests import (
    MOST_NODES,
    GangRestart,
    digest_of,
)
from orchestrator.backends.kubernetes.render import names
from orchestrator.backends.kubernetes.resources import CONFIG_MAPS, LEASES, PODS, Object, Resource
from orchestrator.contract.spec.kubernetes_spec import Kind, KubernetesSpec
from tests.backends.kubernetes.controller.world import HOME, Item, config_map, job, merge
from tests.backends.kubernetes.rendered import a_launch

NOW = 1_800_000_000.0
UID = "9f0d2c9e-8f5b-4f0e-9d55-0b6f1f3e6c11"


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
    """One job with its ConfigMap. Its controller carries out a request after `begins` reads; None:
    never."""

    lease: Item | None
    begins: int | None = None
    job: Any = field(default_factory=lambda: job(notes={names.LAUNCH_ANNOTATION: "1"}))
    asked: Any = field(default_factory=lambda: config_map(owned=True))
    pods: list[Item] = field(default_factory=list)
    looks: int = 0
    merges: int = 0
    late: bool = False
    """The controller starts at the moment of the withdrawal."""
    conflicts: int = 0
    """Number of writes that conflict with the write of another pod."""
    clock: Clock = field(default_factory=Clock)

    def get(self, resource: Resource, namespace: str, name: str) -> Object | None:
        if resource is LEASES:
            assert (namespace, name) == (HOME, "ndctl-controller")
            return self.lease
        if resource is CONFIG_MAPS:
            return cast("Object", self.asked)
        self.looks += 1
        if self.begins is not None and self.looks > self.begins:
            self._serve()
        if resource is PODS:
            return next((one for one in self.pods if one["metadata"]["name"] == name), None)
        return cast("Object", self.job)

    def about(self, resource: Resource, namespace: str, name: str) -> Object | None:
        return self.get(resource, namespace, name)

    def list(self, resource: Resource, namespace: str, *, labels: str) -> Listed:
        assert (resource, labels) == (PODS, "ndctl.dev/job=job")
        return Listed(items=tuple(self.pods), version="1")

    def merge(self, resource: Resource, namespace: str, name: str, change: Object) -> Object:
        assert (resource, name) == (CONFIG_MAPS, "job-launch"), (
            "pods may only write their ConfigMap"
        )
        assert {*change["metadata"]} == {"annotations", "resourceVersion"}
        if self.conflicts:
            self.conflicts -= 1
            raise Conflict("it has changed")
        self.merges += 1
        if self.late and change["metadata"]["annotations"].get(names.GANG_ANNOTATION, "") is None:
            self._serve()
        self.asked = merge(self.asked, change)
        return cast("Object", self.asked)

    def _serve(self) -> None:
        notes = self.asked["metadata"]["annotations"]
        self.pods = [one for one in self.pods if one["metadata"]["uid"] not in str(notes)]
        if names.GANG_ANNOTATION in notes:
            self.job = merge(self.job, {"spec": {"runPolicy": {"suspend": True}}})
        if hosts := notes.get(names.AVOID_ANNOTATION):
            done = {"metadata": {"annotations": {names.EXCLUDED_ANNOTATION: hosts}}}
            self.job = merge(self.job, done)
            self.pods += [
                {"metadata": {"name": names.placeholder_of("job", host), "uid": host}}
                for host in hosts.split(",")
            ]


def lease(age_s: float = 1.0, holder: str = "pod-1") -> Item:
    said = datetime.fromtimestamp(NOW - age_s, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    spec = {"holderIdentity": holder, "leaseDurationSeconds": 15, "renewTime": said}
    return {"metadata": {"resourceVersion": "1"}, "spec": spec}


WISH = GangRestart(by="job-master-0", at=NOW, exclude=("node3",))


def asked(cluster: Cluster) -> bool:
    return ask(cast("Api", cluster), HOME, a_launch(KubernetesSpec()), WISH)


def notes(cluster: Cluster) -> Mapping[str, str]:
    found: Mapping[str, str] = cluster.asked["metadata"]["annotations"]
    return found


def test_a_controller_that_answers_carries_out_the_restart() -> None:
    cluster = Cluster(lease(), begins=3)
    assert asked(cluster)
    assert '"exclude": ["node3"]' in notes(cluster)[names.GANG_ANNOTATION]


def test_a_restart_of_a_queued_job_is_done_without_suspension() -> None:
    done = {names.LAUNCH_ANNOTATION: "1", names.RESTARTED_ANNOTATION: digest_of(WISH.text())}
    assert asked(Cluster(lease(), job=job(notes=done)))


@pytest.mark.parametrize("found", [None, lease(holder=""), lease(age_s=16 + SKEW_S)])
def test_no_request_is_written_without_a_live_lease(found: Item | None) -> None:
    cluster = Cluster(found)
    assert not asked(cluster)
    assert cluster.merges == 0


def test_a_request_is_withdrawn_if_the_controller_does_not_answer() -> None:
    cluster = Cluster(lease())
    assert not asked(cluster)
    assert names.GANG_ANNOTATION not in notes(cluster)


def test_a_controller_that_starts_during_the_withdrawal_keeps_the_request() -> None:
    assert asked(Cluster(lease(), late=True))


def test_a_job_without_a_controller_is_restarted_by_its_leader() -> None:
    cluster = Cluster(lease())
    del cluster.job["metadata"]["annotations"][names.CONTROLLER_ANNOTATION]
    assert not asked(cluster)
    cluster.job["metadata"]["annotations"] = {names.CONTROLLER_ANNOTATION: HOME}
    assert not asked(cluster), "the request belongs to another launch"
    assert cluster.merges == 0


@pytest.mark.parametrize("kind", ["pytorchjob", "jobset"])
@pytest.mark.parametrize(
    ("found", "begins", "keeps", "waits_s"),
    [(lease(), 3, True, 3.0), (lease(), None, False, 15 + PATIENCE_S), (None, 0, False, 0.0)],
    ids=["in a moment", "never", "nobody there"],
)
def test_pods_are_deleted_after_their_nodes_are_excluded(
    kind: Kind, found: Item | None, begins: int | None, keeps: bool, waits_s: float
) -> None:
    cluster = Cluster(found, begins=begins)
    api = cast("Api", cluster)
    assert note(api, HOME, "job", avoid(["node1", "node2"]))
    assert kept_off(api, HOME, kind, cluster.job, ["node1", "node2"]) is keeps
    assert cluster.clock.at == waits_s


def test_nodes_to_avoid_are_merged_and_the_oldest_dropped_at_the_limit() -> None:
    cluster = Cluster(None)
    api = cast("Api", cluster)
    note(api, HOME, "job", avoid(["node2"]))
    note(api, HOME, "job", avoid(["node1", "node2"]))
    assert notes(cluster)[names.AVOID_ANNOTATION] == "node2,node1"
    before = cluster.merges
    note(api, HOME, "job", avoid(["node1"]))
    assert cluster.merges == before, "a request without a change must write nothing"
    note(api, HOME, "job", avoid([f"n{number}" for number in range(MOST_NODES - 1)]))
    every = notes(cluster)[names.AVOID_ANNOTATION].split(",")
    assert (len(every), every[0]) == (MOST_NODES, "node1")


def test_requests_written_at_the_same_time_are_all_kept() -> None:
    cluster = Cluster(None, conflicts=TRIES - 1)
    assert note(cast("Api", cluster), HOME, "job", avoid(["node1"]))
    cluster = Cluster(None, conflicts=TRIES)
    assert not note(cast("Api", cluster), HOME, "job", avoid(["node1"]))


POD: Item = {
    "metadata": {"name": "job-node-0-1-abcde", "uid": UID, "labels": {names.JOB_LABEL: "job"}}
}


@pytest.mark.parametrize(
    ("found", "begins", "ends"), [(lease(), 3, True), (lease(), None, False), (None, 0, False)]
)
def test_a_pod_that_its_account_may_not_delete_is_deleted_by_the_controller(
    found: Item | None, begins: int | None, ends: bool
) -> None:
    cluster = Cluster(found, begins=begins, pods=[POD])
    before = {names.END_ANNOTATION: "job-node-0-0-gone1/0c5e0000-0000-0000-0000-000000000000"}
    cluster.asked["metadata"]["annotations"] = before
    assert end(cast("Api", cluster), HOME, "jobset", "job", POD) is ends
    if found is not None:
        said = notes(cluster)[names.END_ANNOTATION]
        assert said == f"job-node-0-1-abcde/{UID}", "a deleted pod must not be requested again"


def test_allocations_count_restarts_of_leader_and_controller() -> None:
    cluster = Cluster(None)
    cluster.asked["metadata"]["annotations"] = {names.REQUEUES_ANNOTATION: "2"}
    found = job(notes={names.RESTARTS_ANNOTATION: "3"})
    api = cast("Api", cluster)
    assert restarts_of(api, HOME, "job", found) == 5
    cluster.asked["metadata"]["annotations"] = {names.REQUEUES_ANNOTATION: "9" * 50}
    assert restarts_of(api, HOME, "job", None) == 0
