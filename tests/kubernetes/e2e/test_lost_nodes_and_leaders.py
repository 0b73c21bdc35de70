"""Nodes become unreachable, with pods of followers or of the leader on them."""

import json
import os
import signal
from typing import Any

import pytest

from orchestrator.backends.kubernetes.render.names import (
    EXCLUDED_ANNOTATION,
    NEVER_BEGAN_ANNOTATION,
)
from tests.kubernetes.e2e.kube_job import LONG, RESOURCES, KubeNdctl, controller
from tests.kubernetes.testbed import KubeTestbed

pytestmark = [pytest.mark.kubernetes, pytest.mark.process, pytest.mark.timeout(1800)]
FORCED = {"cluster__kubernetes__force_delete_after": "3"}


def uids(job: KubeNdctl) -> dict[str, str]:
    """Pod to its uid."""
    return {it["metadata"]["name"]: it["metadata"]["uid"] for it in job.pods().values()}


def follower_host(job: KubeNdctl) -> str:
    """The host that is not the leader's."""
    (host,) = set(job.hosts()) - {job.leader()}
    return host


@pytest.mark.slow
def test_a_job_recovers_from_a_lost_node_and_then_from_that_of_the_leader(
    job: KubeNdctl, reference: dict[int, float]
) -> None:
    """The pods on both nodes stay Terminating. The remaining pods stay.

    Checks that start a command come after the last loss, because the job keeps training meanwhile.
    """
    job.submit_successfully(**FORCED)
    job.wait_for_step(10)
    leader, gone, before = job.leader(), follower_host(job), uids(job)
    job.testbed.lose_node(gone)
    job.wait_for_step(9, attempt=2)
    between = uids(job)
    assert {name for name in before if before[name] == between[name]} == {"e2e-master-0"}
    assert job.leader() == leader
    assert gone not in job.hosts()

    job.testbed.lose_node(leader)
    job.wait_for_step(10, attempt=3)
    after = uids(job)
    assert {name for name in between if between[name] == after[name]} == {"e2e-worker-0"}
    assert not {leader, gone} & set(job.hosts())
    job.wait_for_end()
    assert job.losses() == reference
    assert job.incidents() == [("host-lost", gone, None), ("leader-lost", leader, None)]
    assert len(job.events("LeaderStarted")) == 2
    job.wait_until("its condition", lambda: "Succeeded" in job.conditions())


@pytest.mark.slow
def test_a_job_recovers_if_the_leaders_pod_is_killed_and_the_api_server_restarts(
    job: KubeNdctl, other_machine: KubeNdctl, reference: dict[int, float]
) -> None:
    """A terminal outside the cluster follows the job through both."""
    follows = other_machine.submit_and_follow(**FORCED)
    job.wait_for_step(6)
    leader, before = job.leader(), uids(job)
    os.kill(job.pids(leader)[0], signal.SIGKILL)
    job.wait_for_step(6, attempt=2)
    job.testbed.restart_api_server()
    job.testbed.compact()
    job.wait_for_end()
    assert job.losses() == reference
    after = uids(job)
    assert {name for name in before if before[name] == after[name]} == {"e2e-worker-0"}
    assert len(job.events("LeaderStarted")) == 2
    out, err = follows.communicate(timeout=600)
    assert follows.returncode == 0, out + err
    assert "step 24" in out


@pytest.mark.slow
def test_a_leaders_pod_that_cannot_start_on_its_node_is_recreated_elsewhere(job: KubeNdctl) -> None:
    """There is no leader then: a waiting follower deletes the pod, and a controller keeps the next
    pod off that node."""
    with controller(job):
        job.submit_successfully(**LONG, cluster__kubernetes__pod_patience="60")
        job.wait_for_step(4)
        before, stays = uids(job), follower_host(job)
        job.testbed.block_image_pulls(*(node for node in job.testbed.nodes if node != stays))
        os.kill(job.pids(job.leader())[0], signal.SIGKILL)
        job.wait_until("no image", lambda: "ImagePullBackOff" in job.output_of("status", "e2e"))
        never = job.wait_until("the pod to be deleted", lambda: never_began(job))
        job.testbed.block_image_pulls(*never)
        job.wait_for_step(1, attempt=2)
    assert not set(never_began(job)) & set(job.hosts())
    about = job.testbed.get(RESOURCES[job.kind], "e2e", job.namespace)["metadata"]
    assert {*about["annotations"][EXCLUDED_ANNOTATION].split(",")} == {*never_began(job)}
    assert uids(job)["e2e-worker-0"] == before["e2e-worker-0"]
    assert [kind for kind, _, _ in job.incidents()] == ["leader-lost"]
    job.output_of("cancel", "e2e")


@pytest.mark.slow
def test_a_job_that_lacks_a_node_says_so_and_resumes_when_there_is_one(job: KubeNdctl) -> None:
    """The job releases its hosts once, which does not help."""
    job.submit_successfully(**LONG, cluster__kubernetes__pod_patience="30")
    job.wait_for_step(4)
    leader = job.leader()
    job.kubectl("cordon", *(node for node in job.testbed.nodes if node != leader))

    def says(*words: str) -> bool:
        text = job.output_of("status", "e2e")
        return all(one in text for one in words)

    lacks = ("Unschedulable", "wait: 1 of 2 hosts available since", "ndctl cancel e2e")
    job.wait_until("what it lacks", lambda: says(*lacks))
    job.wait_until("the same once more", lambda: says(*lacks, "all hosts released 1 time"))
    saved = newest_checkpoint(job)
    job.kubectl("uncordon", *job.testbed.nodes)
    job.wait_for_step(saved + 1, attempt=2)
    assert (len(job.events("LeaderStarted")), job.status()["restarts"]) == (2, 0)
    job.output_of("cancel", "e2e")


def never_began(job: KubeNdctl) -> list[str]:
    """Nodes on which the leader's pod never started, so that it was deleted."""
    found = job.testbed.get("configmaps", "e2e-launch", job.namespace)
    output = found["metadata"].get("annotations", {}).get(NEVER_BEGAN_ANNOTATION, "")
    return output.split(",") if output else []


def suspended(job: KubeNdctl, holds: bool) -> None:
    change = json.dumps({"spec": {"runPolicy": {"suspend": holds}}})
    job.kubectl("patch", RESOURCES[job.kind], "e2e", "--type=merge", "-p", change)


@pytest.mark.slow
def test_suspension_cordon_and_drain_spend_no_restart_budget(job: KubeNdctl) -> None:
    """The job is long enough for the leader to read the state of its nodes meanwhile. It writes
    checkpoints only when it is asked to stop."""
    job.submit_successfully(**FORCED, **LONG, resilience__max_restarts="0")
    job.wait_for_step(4)
    suspended(job, True)
    job.wait_until("no pod", lambda: not job.pods())
    saved = newest_checkpoint(job)
    assert saved >= 4, "written when it was asked to stop"
    assert "is suspended" in job.output_of("status", "e2e").partition("\n")[0]
    suspended(job, False)
    job.wait_for_step(saved + 1, attempt=2)

    wanted = follower_host(job)
    job.kubectl("cordon", wanted)
    job.wait_until(
        "another host", lambda: len(job.started_attempts()) == 3 and wanted not in job.hosts()
    )
    job.wait_for_step(newest_checkpoint(job) + 1, attempt=3)
    evicted = follower_host(job)
    saved = newest_checkpoint(job)
    evict(job.testbed, job.pod_of(evicted), job.namespace)
    job.wait_until("its checkpoint", lambda: newest_checkpoint(job) > saved)
    job.wait_for_step(newest_checkpoint(job) + 1, attempt=4)

    job.output_of("cancel", "e2e")
    last = newest_checkpoint(job)
    assert (job.final_state(), sorted(job.losses())) == ("CANCELLED", list(range(1, last + 1)))
    job.assert_all_samples_read_once(last)
    assert (job.incidents(), job.status()["restarts"]) == ([], 0)


def newest_checkpoint(job: KubeNdctl) -> int:
    return max(int(event["step"]) for event in job.events("CheckpointSaved"))


def evict(kube: KubeTestbed, pod: str, namespace: str) -> None:
    """Evicts a pod through the API, like `kubectl drain`."""
    body: dict[str, Any] = {
        "apiVersion": "policy/v1beta1",
        "kind": "Eviction",
        "metadata": {"name": pod, "namespace": namespace},
    }
    file = kube.folder / "eviction.json"
    file.write_text(json.dumps(body))
    where = f"/api/v1/namespaces/{namespace}/pods/{pod}/eviction"
    kube.kubectl("create", "--raw", where, "-f", str(file))
