"""Faults of JobSets and TrainJobs, of an applied job, of pods that barely started, and of a
controller."""

import json
import os
import shlex
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from orchestrator.backends.kubernetes.observe.reports import to_annotation
from orchestrator.backends.kubernetes.render import names
from orchestrator.job.reports.job_report import JobReport
from tests.e2e.job import kill, wait_for
from tests.kubernetes.e2e.kube_job import JOB, LIMIT_S, LONG, NAMESPACE, KubeNdctl, identity
from tests.kubernetes.test_controller import deploy_controller, lease_holder
from tests.kubernetes.testbed import KubeTestbed

pytestmark = [
    pytest.mark.kubernetes,
    pytest.mark.process,
    pytest.mark.slow,
    pytest.mark.timeout(1800),
]
BESIDE = "configmaps,secrets,serviceaccounts,roles,rolebindings,pods,pytorchjobs"


def newest_checkpoint(job: KubeNdctl) -> int:
    return max((int(event["step"]) for event in job.events("CheckpointSaved")), default=0)


@pytest.mark.parametrize(
    ("kind", "done"),
    [("jobset", "Completed"), ("trainjob", "Complete")],
    ids=["jobset", "trainjob"],
)
def test_pods_of_the_other_kinds_stay_after_a_killed_rank(
    job: KubeNdctl, reference: dict[int, float], kind: str, done: str
) -> None:
    job = replace(job, kind=kind)
    job.submit_successfully()
    job.wait_for_step(3)
    before = {host: identity(pod) for host, pod in job.pods().items()}
    kill(job.rank_pid(2))
    job.wait_for_step(9, attempt=2)
    assert {host: identity(pod) for host, pod in job.pods().items()} == before
    job.wait_for_end()
    assert job.losses() == reference
    job.assert_all_samples_read_once()
    (killed,) = job.incidents()
    assert (killed[0], killed[2]) == ("rank-killed", 2)
    job.wait_until("its end for Kubernetes", lambda: done in job.conditions())


def test_an_applied_job_runs_through_its_whole_life(
    job: KubeNdctl, other_machine: KubeNdctl
) -> None:
    """A rank is killed; the job is cancelled, resumed and ends; one delete removes everything."""
    steps = {"train__steps": "120"}
    job.render_and_apply(**steps)
    job.wait_for_step(3)
    kill(job.rank_pid(3))
    job.wait_for_step(9, attempt=2)
    there = ("--backend", "kubernetes", "-n", NAMESPACE)
    other_machine.output_of("cancel", JOB, *there)
    assert job.final_state() == "CANCELLED"
    saved = newest_checkpoint(job)
    assert saved >= 9

    other_machine.submit_successfully("--resume", **steps)
    job.wait_until("the second launch", lambda: len(job.events("JobSubmitted")) == 2)
    job.wait_until("its end", job.has_ended)
    assert job.final_state() == "SUCCEEDED", job.failure_report()
    assert sorted(job.losses()) == list(range(1, 121))
    job.assert_all_samples_read_once(120)
    assert [(kind, rank) for kind, _, rank in job.incidents()] == [("rank-killed", 3)]
    assert json.loads(other_machine.output_of("status", JOB, "--json"))["state"] == "SUCCEEDED"

    job.kubectl("delete", "pytorchjob", JOB)

    def left() -> str:
        return job.kubectl("get", BESIDE, "-l", f"ndctl.dev/job={JOB}", "-o", "name")

    job.wait_until("the garbage collector", lambda: not left())
    assert json.loads(other_machine.output_of("status", JOB, "--json"))["state"] == "SUCCEEDED"
    job.assert_nothing_left()


def test_a_leaders_pod_that_never_starts_is_deleted_before_there_is_a_leader(
    job: KubeNdctl,
) -> None:
    """The other pod, which waits for the leader, deletes it."""
    job.testbed.block_image_pulls(*job.testbed.nodes)
    job.submit_successfully(**LONG, cluster__kubernetes__pod_patience="60")
    job.wait_until("both pods on nodes", lambda: len(job.pods()) == 2)
    masters = {host for host, pod in job.pods().items() if pod["metadata"]["name"] == MASTER}
    (worker,) = set(job.pods()) - masters
    first = uid_of(job)
    job.testbed.block_image_pulls(*(node for node in job.testbed.nodes if node != worker))
    job.wait_until("the pod to be deleted", lambda: uid_of(job) not in (first, ""))
    assert not job.has_started()
    assert "PENDING" in job.output_of("list", "--backend", "kubernetes", "-n", NAMESPACE)
    job.testbed.block_image_pulls()
    job.wait_for_step(2)
    assert (job.incidents(), len(job.events("LeaderStarted"))) == ([], 1)
    job.output_of("cancel", JOB)


MASTER = f"{JOB}-master-0"


def uid_of(job: KubeNdctl) -> str:
    """Uid of the leader's pod, with or without a node; empty if there is no such pod."""
    found = job.testbed.objects("pods", job.namespace, f"ndctl.dev/job={JOB}")
    return next((it["metadata"]["uid"] for it in found if it["metadata"]["name"] == MASTER), "")


def test_a_pod_deleted_before_its_process_handles_signals_does_not_join(
    job: KubeNdctl, tmp_path: Path
) -> None:
    """The kernel drops a SIGTERM for which the first process of a container has no handler. On a
    cold node the interpreter may start as slowly as here."""
    slow = job.testbed.runs / "slow-python"
    python = shlex.quote(sys.executable)
    slow.write_text(f'#!/bin/sh\nsleep 6\nexec {python} "$@"\n')
    slow.chmod(0o755)
    job.submit_successfully(
        **LONG, cluster__kubernetes__python=str(slow), resilience__stop_grace="300"
    )
    worker = f"{JOB}-worker-0"

    def running() -> Any:
        found = {it["metadata"]["name"]: it for it in job.pods().values()}
        pod = found.get(worker)
        return pod if pod is not None and pod["status"].get("phase") == "Running" else None

    pod = job.wait_until("the worker", running)
    job.kubectl("delete", "pod", worker, "--wait=false")
    first = pod["metadata"]["uid"]

    def replaced() -> bool:
        uids = {it["metadata"]["uid"] for it in job.pods().values()}
        return first not in uids

    wait_for(replaced, "its end, long before its grace period is over", 100.0)
    job.wait_for_step(2)
    assert (job.incidents(), job.status()["attempt"]) == ([], 1)
    job.output_of("cancel", JOB)


def test_the_work_of_a_killed_active_controller_continues(kube: KubeTestbed) -> None:
    """The test reads what the controller notes on a job that has no running pod. Either the other
    controller takes over, or the killed controller's container is restarted and leads again."""
    deploy_controller(kube)
    job = {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {
            "name": "job",
            "labels": names.labels_of_job("job"),
            "annotations": {names.LAUNCH_ANNOTATION: "1"},
        },
        "spec": {"runPolicy": {"suspend": True}, "pytorchReplicaSpecs": {"Master": REPLICA}},
    }
    kube.apply(job, state("RUNNING", 1), namespace=NAMESPACE)
    noted(kube, "RUNNING")
    kube.wait_for("a leader", lambda: lease_holder(kube, NAMESPACE))
    first = lease_holder(kube, NAMESPACE)
    os.kill(kube.pids(first, NAMESPACE)[0], signal.SIGKILL)
    place = kube.folder / "state.yaml"
    place.write_text(yaml.safe_dump(state("RECOVERING", 2)))
    kube.kubectl("-n", NAMESPACE, "apply", "-f", str(place))
    noted(kube, "RECOVERING")
    kube.wait_for("a leader again", lambda: lease_holder(kube, NAMESPACE))
    log = kube.kubectl("-n", NAMESPACE, "logs", lease_holder(kube, NAMESPACE))
    assert "record the state of PyTorchJob ndctl/job: RECOVERING at step 7" in log
    kube.kubectl("-n", NAMESPACE, "delete", "pytorchjob", "job", "--wait=false")


REPLICA = {
    "replicas": 1,
    "template": {"spec": {"containers": [{"name": "pytorch", "image": "ndctl:1"}]}},
}


def state(state: Any, attempt: int) -> dict[str, Any]:
    """The state ConfigMap as a leader writes it."""
    report = JobReport(
        launch=1,
        state=state,
        message="as a test says",
        step=7,
        steps=9,
        attempt=attempt,
        updated=1795456109.0 + 100 * attempt,
    )
    labels = {**names.labels_of_job("job"), names.HOLDS_LABEL: "state"}
    metadata = {"name": "job-state", "namespace": NAMESPACE, "labels": labels}
    notes = to_annotation(report)
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {**metadata, "annotations": notes}}


def noted(kube: KubeTestbed, state: str) -> None:
    def holds() -> bool:
        found = kube.get("pytorchjobs", "job", NAMESPACE)["metadata"]["annotations"]
        return bool(found.get(names.STATE_ANNOTATION) == state)

    kube.wait_for(f"{state} on the job", holds, LIMIT_S)
