"""Deletion of a pod: it ends by itself, it is force-deleted if its node is dead, or it stays."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, cast

import pytest

from orchestrator.backends.kubernetes.api.api_errors import Forbidden
from orchestrator.backends.kubernetes.api.client import Api, Listed
from orchestrator.backends.kubernetes.finalizers import failed
from orchestrator.backends.kubernetes.pod_deletion import FORCED_S, end_pod
from orchestrator.backends.kubernetes.render.names import CONTROLLER_ANNOTATION, END_ANNOTATION
from orchestrator.backends.kubernetes.resources import (
    CONFIG_MAPS,
    LEASES,
    NODES,
    PODS,
    Object,
    Resource,
)
from orchestrator.contract.spec.kubernetes_spec import Kind
from orchestrator.errors import BackendError, MustLeave, Unanswered
from tests.agent.world import TurnedClock

FORCE_S, GRACE_S = 120.0, 40.0
POD: Object = {
    "metadata": {
        "name": "job-worker-0",
        "namespace": "ns",
        "uid": "u1",
        "resourceVersion": "1",
        "labels": {"ndctl.dev/job": "job"},
    },
    "spec": {"nodeName": "node-7", "terminationGracePeriodSeconds": GRACE_S},
}
MAY_NOT = Forbidden("ndctl-job may not do that", fix="kubectl create role …")


@dataclass
class Server:
    """One pod and its node. A watch advances the time."""

    ends_after_s: float | None = None
    """Seconds from the deletion until the pod ends by itself."""
    ready: bool = True
    hides_nodes: bool = False
    refuses_force: bool = False
    clock: TurnedClock = field(default_factory=TurnedClock)
    deleted_at: float | None = None
    forced_at: float | None = None
    pod: Object = field(default_factory=lambda: POD)
    controller: bool = False
    """A controller deletes the requested pods, by force after `forces_s`."""
    forces_s: float = FORCE_S
    asked: str = ""
    """The request to the controller."""

    @property
    def is_there(self) -> bool:
        ended = self.ends_after_s is not None and self.deleted_at is not None
        over = ended and self.clock.time >= (self.deleted_at or 0) + (self.ends_after_s or 0)
        forced = self.controller and self.asked and not self.ready
        forced = forced and self.clock.time >= (self.deleted_at or 0) + self.forces_s
        return not (over or forced) and self.forced_at is None

    def about(self, *asked: Any) -> Object | None:
        return self.get(*asked)

    def list(self, *_: object, **__: object) -> Listed:
        return Listed(items=(self.pod,) if self.is_there else (), version="1")

    def watch(self, *_: object, version: str, labels: str, timeout_s: float) -> Iterator[Object]:
        there = self.is_there
        self.clock.time += timeout_s
        if there and not self.is_there:
            yield {"type": "DELETED", "object": self.pod}

    def get(self, resource: Resource, namespace: str | None, name: str) -> Object | None:
        if resource is PODS:
            gone = {"deletionTimestamp": "2026-11-22T05:00:00Z"} if self.asked else {}
            return {**self.pod, "metadata": {**self.pod["metadata"], **gone}}
        if resource is LEASES:
            now = datetime.fromtimestamp(self.clock.now(), UTC).isoformat()
            spec = {"holderIdentity": "c", "leaseDurationSeconds": 15, "renewTime": now}
            return {"spec": spec}
        if resource is not NODES:
            notes = {CONTROLLER_ANNOTATION: "ns"} if self.controller else {}
            return {"metadata": {"name": name, "resourceVersion": "1", "annotations": notes}}
        if self.hides_nodes:
            raise MAY_NOT
        ready = {"type": "Ready", "status": "True" if self.ready else "Unknown"}
        return {"metadata": {"name": name}, "spec": {}, "status": {"conditions": [ready]}}

    def delete(
        self, resource: Resource, namespace: str, name: str, *, uid: str, grace_s: int | None = None
    ) -> None:
        assert uid == "u1", "another pod of the same name must stay"
        if grace_s is None:
            self.deleted_at = self.clock.time
        elif self.refuses_force:
            raise MAY_NOT
        else:
            self.forced_at = self.clock.time

    def merge(self, resource: Resource, namespace: str, name: str, change: Object) -> None:
        assert (resource, name) == (CONFIG_MAPS, "job-launch"), "the leader may write nothing else"
        self.asked = change["metadata"]["annotations"][END_ANNOTATION]
        self.deleted_at = self.clock.time


def ended(server: Server, kind: Kind = "pytorchjob") -> Server:
    end_pod(cast(Api, server), kind, "node-7", server.pod, FORCE_S)
    return server


def test_a_pod_that_ends_is_not_force_deleted() -> None:
    assert ended(Server(ends_after_s=30)).forced_at is None
    slow = ended(Server(ends_after_s=FORCE_S + 10))
    assert slow.forced_at is None, "the node is healthy, so the pod has its own grace period"


@pytest.mark.parametrize(
    ("server", "after_s"),
    [(Server(ready=False), FORCE_S), (Server(hides_nodes=True), FORCE_S + GRACE_S)],
)
def test_a_pod_on_a_dead_node_is_force_deleted_after_the_grace(
    server: Server, after_s: float
) -> None:
    """Without the right to read nodes, ndctl waits for as long as a healthy node may take."""
    ended(server)
    assert server.forced_at is not None
    assert server.deleted_at is not None
    assert server.forced_at - server.deleted_at == pytest.approx(after_s, abs=1.0)


HELD: Object = {
    **POD,
    "metadata": {
        **POD["metadata"],
        "name": "job-node-0-1-abcde",
        "finalizers": ["batch.kubernetes.io/job-tracking"],
    },
}
JOBSET: Kind = "jobset"


def test_the_controller_deletes_pods_without_known_names() -> None:
    for server in (
        Server(controller=True, pod=HELD, ends_after_s=30),
        Server(controller=True, pod=HELD, ready=False),
        Server(controller=True, pod=HELD, ready=False, forces_s=FORCE_S + FORCED_S - 5),
    ):
        ended(server, JOBSET)
        assert server.asked == "job-node-0-1-abcde/u1"
        assert (server.is_there, server.forced_at) == (False, None), (
            "the leader must delete nothing itself"
        )
    never = Server(controller=True, pod=HELD, ready=False, forces_s=1e6)
    with pytest.raises(BackendError, match="only the controller may delete") as raised:
        ended(never, JOBSET)
    assert "or an administrator types `kubectl apply -k manifests/controller`" in raised.value.fix


def test_without_a_controller_such_a_pod_has_to_end_by_itself() -> None:
    server = Server(pod=HELD)
    with pytest.raises(MustLeave, match="is not deleted: only the controller may") as raised:
        ended(server, JOBSET)
    assert (server.asked, server.deleted_at) == ("", None)
    change = '--subresource=status --type=merge -p \'{"status":{"phase":"Failed"}}\''
    assert f"patch pod job-node-0-1-abcde {change} && kubectl -n ns delete" in raised.value.fix
    leaving = {**HELD["metadata"], "deletionTimestamp": "2026-11-22T05:00:00Z"}
    going = Server(pod={**HELD, "metadata": leaving}, ends_after_s=30, deleted_at=0.0)
    assert not ended(going, JOBSET).is_there, "another client has deleted the pod"


def test_a_lost_pod_keeps_its_conditions_and_counts_as_no_failure() -> None:
    bound = {"type": "PodScheduled", "status": "True"}
    before = {"type": "DisruptionTarget", "status": "True", "reason": "DeletionByTaintManager"}
    status = failed({**HELD, "status": {"conditions": [bound, before]}})["status"]
    assert [(one["type"], one.get("reason")) for one in status["conditions"]] == [
        ("PodScheduled", None),
        ("DisruptionTarget", "NodeLost"),
    ]


def test_a_pod_that_does_not_end_on_a_healthy_node_is_left_to_a_person() -> None:
    with pytest.raises(Unanswered, match="does not terminate although") as raised:
        ended(Server())
    assert "`kubectl -n ns describe pod job-worker-0`" in raised.value.fix


def test_without_the_right_to_force_the_message_says_what_to_type() -> None:
    with pytest.raises(BackendError, match="stays on node-7, which is unreachable") as raised:
        ended(Server(ready=False, refuses_force=True))
    force = "`kubectl -n ns delete pod job-worker-0 --force --grace-period=0`"
    assert raised.value.fix == f"{force}\n  or kubectl create role …"
