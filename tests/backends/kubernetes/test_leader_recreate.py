"""Recreation of the leader's pod if no agent can reach it."""

from dataclasses import dataclass, field
from typing import Any, cast

import pytest
from msgspec.structs import replace

from orchestrator.backends.kubernetes import leader_recreate
from orchestrator.backends.kubernetes.api.api_errors import Conflict, Forbidden
from orchestrator.backends.kubernetes.api.client import Api, Listed
from orchestrator.backends.kubernetes.leader_recreate import BEGIN_S, MOST, YOUNG_S, fate_of, revive
from orchestrator.backends.kubernetes.observe.object_fields import seconds_of
from orchestrator.backends.kubernetes.render.names import NEVER_BEGAN_ANNOTATION
from orchestrator.backends.kubernetes.resources import (
    CONFIG_MAPS,
    EVENTS,
    NODES,
    PODS,
    Object,
    Resource,
)
from orchestrator.contract.launch import LaunchPlan
from orchestrator.contract.spec.kubernetes_spec import KubernetesSpec
from orchestrator.errors import BackendError
from tests.agent.world import TurnedClock
from tests.backends.kubernetes.rendered import a_launch

BOUND = "2026-11-22T05:00:00Z"
AT = seconds_of(BOUND)
BACK_OFF = {"waiting": {"reason": "ImagePullBackOff", "message": "Back-off pulling x"}}
RUNS = {"running": {"startedAt": BOUND}}
CREATING = {"waiting": {"reason": "ContainerCreating"}}


def pod(
    state: Object | None = None, *, node: str = "node-7", master: bool = True, **more: Any
) -> Object:
    role = {"training.kubeflow.org/replica-type": "master" if master else "worker"}
    bound = {"type": "PodScheduled", "status": "True" if node else "False"}
    lacks = {"reason": "Unschedulable", "message": "0/4 nodes are available: 4 Insufficient cpu."}
    return {
        "metadata": {
            "name": "job-master-0" if master else "job-worker-0",
            "uid": "u1",
            "creationTimestamp": BOUND,
            "labels": {"ndctl.dev/job": "job", **role},
            **more,
        },
        "spec": {"nodeName": node} if node else {},
        "status": {
            "phase": "Running" if state == RUNS else "Pending",
            "conditions": [{**bound, "lastTransitionTime": BOUND, **({} if node else lacks)}],
            "containerStatuses": [{"restartCount": 0, "state": state}] if state else [],
        },
    }


def fate(one: Object, after_s: float, silent_s: float | None = 1e6, patience_s: float = 600) -> str:
    worker = pod(RUNS, master=False)
    found = fate_of([worker, one], (), AT + after_s, silent_s=silent_s, patience_s=patience_s)
    assert found is not None
    assert found.pod is one
    assert found.why
    return found.does


LEAVING: dict[str, Any] = {"deletionTimestamp": BOUND}
FIRST = {"batch.kubernetes.io/job-completion-index": "0"}
INDEXED: dict[str, Any] = {"labels": {}, "annotations": FIRST}


@pytest.mark.parametrize(
    ("one", "after_s", "silent_s", "does"),
    [
        (pod(node=""), 9e9, 9e9, "wait"),
        (pod(BACK_OFF), BEGIN_S - 1, 9e9, "wait"),
        (pod(BACK_OFF), BEGIN_S, 9e9, "move"),
        (pod(BACK_OFF), BEGIN_S, None, "move"),
        (pod(BACK_OFF, **INDEXED), BEGIN_S, None, "move"),
        (pod(CREATING), 9e9, 9e9, "move-if-silent"),
        (pod(), 9e9, 9e9, "move-if-silent"),
        (pod(BACK_OFF, **LEAVING), 0, None, "end"),
        (pod(RUNS), 50, 60, "wait"),
        (pod(RUNS), 100, 60, "end"),
        (pod(RUNS), YOUNG_S - 1, 9e9, "wait"),
        (pod(RUNS), YOUNG_S, 9e9, "end"),
        (pod(RUNS), 9e9, None, "wait"),
    ],
)
def test_the_action_follows_from_the_leaders_pod(
    one: Object, after_s: float, silent_s: float | None, does: str
) -> None:
    assert fate(one, after_s, silent_s) == does


def test_a_leaders_pod_is_recreated_elsewhere_while_a_terminal_waits() -> None:
    """A waiting terminal exits after `pod_patience`."""
    assert [fate(pod(BACK_OFF), s, patience_s=100) for s in (49, 50)] == ["wait", "move"]


def test_problems_of_a_predecessor_do_not_move_a_leaders_pod() -> None:
    """The leader's pod always has the same name. The new pod is pulling its image."""

    def event(reason: str, uid: str, at: str) -> Object:
        about = {"kind": "Pod", "name": "job-master-0", "uid": uid}
        return {"involvedObject": about, "reason": reason, "message": "", "lastTimestamp": at}

    late = [event("FailedMount", "u1", "2026-11-22T05:00:10Z")]
    for more in (
        [event("FailedMount", "u0", "2026-11-22T04:20:00Z")],
        [*late, event("Pulling", "u1", "2026-11-22T05:00:20Z")],
    ):
        found = fate_of([pod(CREATING)], more, AT + 125, silent_s=None, patience_s=600)
        assert (found and found.does) == "move-if-silent"
    found = fate_of([pod(CREATING)], late, AT + 125, silent_s=None, patience_s=600)
    assert (found and found.does) == "move"


@pytest.mark.parametrize("field", ["state", "lastState"])
def test_a_leaders_pod_that_ran_before_is_not_moved_to_another_node(field: str) -> None:
    one = pod(BACK_OFF)
    ended: Object = {"terminated": {"exitCode": 1, "startedAt": BOUND}}
    one["status"]["containerStatuses"] = [{"restartCount": 1, field: ended}]
    assert fate(one, 9e9) == "end"


def test_without_a_leaders_pod_ndctl_waits_for_the_operator() -> None:
    over = pod(RUNS)
    over["status"]["phase"] = "Failed"
    pods = [pod(RUNS, master=False), over]
    assert fate_of(pods, (), AT, silent_s=9e9, patience_s=600) is None


@dataclass
class Cluster:
    """One job with its leader's pod and node, in memory."""

    pod: Object
    notes: dict[str, str] = field(default_factory=dict)
    ready: bool = True
    refusal: BackendError | None = None
    done: list[str] = field(default_factory=list)
    no_events: bool = False
    clock: TurnedClock = field(default_factory=lambda: TurnedClock(AT + BEGIN_S + 1))

    def list(self, resource: Resource, namespace: str, **_: object) -> Listed:
        if resource is EVENTS and self.no_events:
            raise Forbidden("job-pods may not list events in namespace ns")
        return Listed(items=(self.pod,) if resource is PODS else (), version="1")

    def get(self, resource: Resource, namespace: str | None, name: str) -> Object:
        if resource is NODES:
            status = "True" if self.ready else "Unknown"
            conditions = [{"type": "Ready", "status": status}]
            return {"metadata": {"name": name}, "spec": {}, "status": {"conditions": conditions}}
        about = {"name": name, "resourceVersion": "5"}
        notes = self.notes if resource is CONFIG_MAPS else {"ndctl.dev/launch": "3"}
        return {"metadata": {**about, "annotations": dict(notes)}}

    def merge(self, resource: Resource, namespace: str, name: str, change: Object) -> None:
        if self.refusal is not None:
            raise self.refusal
        assert (resource, name) == (CONFIG_MAPS, "job-launch"), "the agent may write nothing else"
        assert change["metadata"]["resourceVersion"] == "5", (
            "of two simultaneous writes, only one may succeed"
        )
        self.notes |= change["metadata"]["annotations"]


LAUNCH = replace(a_launch(KubernetesSpec(image="x", pod_patience=600)), launch=3)


def asked(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, launch: LaunchPlan = LAUNCH
) -> Cluster:
    """Ask for the recreation of a leader's pod whose grace period is over."""
    monkeypatch.setattr(leader_recreate, "end_pod", lambda *_: cluster.done.append("end"))

    def exclude(hosts: Any) -> None:
        cluster.done.append(f"not on {', '.join(hosts)}")

    revive(cast(Api, cluster), "ns", launch, exclude, silent_s=None)
    return cluster


def test_a_node_is_excluded_before_the_leaders_pod_is_deleted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = asked(Cluster(pod(BACK_OFF)), monkeypatch)
    assert cluster.done == ["not on node-7", "end"]
    assert cluster.notes == {NEVER_BEGAN_ANNOTATION: "node-7"}
    asked(cluster, monkeypatch)
    assert cluster.notes == {NEVER_BEGAN_ANNOTATION: "node-7,node-7"}, (
        "each failed start on the node is counted"
    )


def test_without_the_right_to_events_the_pods_status_decides(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = asked(Cluster(pod(BACK_OFF), no_events=True), monkeypatch)
    assert cluster.done == ["not on node-7", "end"]
    assert "job-pods may not list events" in caplog.text


@pytest.mark.parametrize(("ready", "done"), [(True, []), (False, ["not on node-7", "end"])])
def test_a_large_image_gets_more_time_and_a_dead_node_does_not(
    ready: bool, done: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert asked(Cluster(pod(CREATING), ready=ready), monkeypatch).done == done


def test_after_several_nodes_the_image_is_suspected_and_a_person_decides(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = {NEVER_BEGAN_ANNOTATION: ",".join(f"node-{n}" for n in range(MOST))}
    cluster = Cluster(pod(BACK_OFF), before)
    with pytest.raises(BackendError) as raised:
        asked(cluster, monkeypatch)
    said = str(raised.value)
    assert "moved away from node-0, node-1, node-2, so it is not moved again" in said
    assert "it has not started on node-7 for 121 s, ImagePullBackOff: Back-off pulling x" in said
    assert "`kubectl -n ns describe pod job-master-0`" in said
    assert "`kubectl cordon node-7` and `kubectl -n ns delete pod job-master-0`" in said
    assert cluster.done == []


def test_without_the_right_the_message_says_what_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    refusal = Forbidden("job-pods may not patch configmaps", fix="kubectl create role …")
    cluster = Cluster(pod(BACK_OFF), refusal=refusal)
    with pytest.raises(BackendError, match="job-pods may not patch configmaps") as raised:
        asked(cluster, monkeypatch)
    assert "`kubectl cordon node-7` and `kubectl -n ns delete pod job-master-0`" in str(
        raised.value
    )
    assert "or kubectl create role …" in str(raised.value)
    assert cluster.done == [], "a pod that cannot be counted must not be deleted"


def test_pods_of_another_terminal_or_a_later_launch_are_not_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    conflict = Conflict("the object has been modified")
    assert asked(Cluster(pod(BACK_OFF), refusal=conflict), monkeypatch).done == []
    later = replace(LAUNCH, launch=4)
    assert asked(Cluster(pod(BACK_OFF)), monkeypatch, later).done == []
