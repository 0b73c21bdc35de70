"""Status of a job that is unreachable or deleted, and what kubectl shows of a job."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.backends.kubernetes.status_server import StatusServer, status_server
from tests.e2e.job import ROOT, kill
from tests.kubernetes.e2e.kube_job import JOB, LIMIT_S, LONG, NAMESPACE, KubeNdctl
from tests.kubernetes.testbed import KubeTestbed
from tests.notify.collector import attributes_of, collecting

pytestmark = [
    pytest.mark.kubernetes,
    pytest.mark.process,
    pytest.mark.slow,
    pytest.mark.timeout(1800),
]
THERE = ("--backend", "kubernetes", "-n", NAMESPACE)
BESIDE = "configmaps,secrets,serviceaccounts,roles,rolebindings,pods,pytorchjobs"


def first_line(user: KubeNdctl) -> str:
    return user.output_of("status", JOB).partition("\n")[0]


def state_of(job: KubeNdctl) -> dict[str, str]:
    found: dict[str, str] = job.testbed.get("configmaps", f"{JOB}-state", job.namespace)["data"]
    return found


def reasons(job: KubeNdctl) -> list[str]:
    """Reasons of the leader's events in order."""
    events = job.testbed.objects("events", job.namespace)
    mine = [one for one in events if one["source"].get("component") == "ndctl"]
    return [one["reason"] for one in sorted(mine, key=lambda one: str(one["lastTimestamp"]))]


def left_of(job: KubeNdctl) -> str:
    return job.kubectl("get", BESIDE, "-l", f"ndctl.dev/job={JOB}", "-o", "name")


def newest_checkpoint(job: KubeNdctl) -> int:
    return max((int(event["step"]) for event in job.events("CheckpointSaved")), default=0)


def test_a_job_is_shown_as_last_known_while_the_api_server_is_down(
    job: KubeNdctl, other_machine: KubeNdctl
) -> None:
    other_machine.submit_successfully(**LONG)
    job.wait_for_step(6)
    before = json.loads(other_machine.output_of("status", JOB, "--json"))
    assert (before["state"], before["as_of"]) == ("RUNNING", None)
    host = job.events("LeaderStarted")[0]["host"]
    words = ("sh", "-c", "echo $NDCTL_HOST; echo wrong >&2; sleep 1; exit 7")
    done = other_machine("exec", JOB, "--host", host, "--", *words)
    assert (done.code, done.out.split(), "wrong" in done.err) == (7, [host], True)
    # A megabyte goes in and out at once, and `sort` only writes when its input has ended.
    lines = "".join(f"{number:07d}\n" for number in range(131_072, 0, -1))
    done = other_machine(
        "exec", JOB, "--host", host, "--", "sh", "-c", "tee /dev/stderr | sort", given=lines
    )
    assert done.code == 0
    assert done.out.splitlines() == sorted(lines.splitlines())
    assert done.err == lines

    job.testbed.stop_control_plane()
    done = other_machine("status", JOB)
    assert (done.code, done.err) == (0, "")
    head = done.out.partition("\n")[0]
    assert head.startswith(f"{JOB}: RUNNING as of "), head
    assert "; the API server of context envtest (https://127.0.0.1:" in head
    assert done.out.count("is unreachable") == 1
    body = json.loads(other_machine.output_of("status", JOB, "--json"))
    assert (body["state"], body["leader_alive"]) == ("RUNNING", None)
    assert body["step"] >= before["step"]
    assert "is unreachable" in body["reason"]
    listed = other_machine("list")
    assert "RUNNING" in listed.out
    assert "PENDING" not in listed.out
    assert listed.err.count("is unreachable") == 1
    job.wait_for_step(body["step"] + 5)
    job.testbed.start_control_plane()

    job.wait_until("its state", lambda: "as of" not in first_line(other_machine))
    assert first_line(other_machine).startswith(f"{JOB}: RUNNING, ")
    other_machine.output_of("cancel", JOB)


def test_a_deleted_job_is_cancelled_at_once_and_can_be_resumed(
    job: KubeNdctl, other_machine: KubeNdctl
) -> None:
    other_machine.submit_successfully(**LONG)
    job.wait_for_step(6)
    seen = json.loads(other_machine.output_of("status", JOB, "--json"))["step"]
    job.kubectl("delete", "pytorchjob", JOB, "--wait=false")
    shown = other_machine.output_of("status", JOB)
    deleted = f"PyTorchJob {NAMESPACE}/{JOB} was deleted"
    ended = "cancelled by somebody, in the scheduler"  # on a busy machine, which asks later
    assert shown.startswith(tuple(f"{JOB}: CANCELLED, {why}" for why in (deleted, ended))), shown
    assert shown.rstrip().endswith("--resume")
    job.wait_for_end("CANCELLED")
    saved = newest_checkpoint(job)
    assert saved >= seen, "written when it was stopped"
    job.assert_nothing_left()
    job.wait_until("the garbage collector", lambda: not left_of(job))
    body = json.loads(other_machine.output_of("status", JOB, "--json"))
    assert (body["state"], body["step"] >= seen) == ("CANCELLED", True)
    job.testbed.stop_control_plane()
    assert first_line(other_machine).startswith(f"{JOB}: CANCELLED, "), (
        "the last known state is stored"
    )
    job.testbed.start_control_plane()

    other_machine.submit_successfully("--resume", **LONG)
    job.wait_until("the second launch", lambda: len(job.events("JobSubmitted")) == 2)
    job.wait_for_step(saved + 1, attempt=2)
    other_machine.output_of("cancel", JOB)


def test_a_job_whose_namespace_was_deleted_keeps_its_last_known_state(
    job: KubeNdctl, other_machine: KubeNdctl, kube: KubeTestbed
) -> None:
    """A following terminal also reports the last checkpoint."""
    namespace = kube.namespace("team-b")
    here, there = replace(job, namespace=namespace), replace(other_machine, namespace=namespace)
    follower = there.submit_and_follow(**LONG)
    here.wait_for_step(6)
    kube.kubectl("delete", "namespace", namespace, "--wait=false")
    output, err = follower.communicate(timeout=LIMIT_S)
    assert follower.returncode == 7, output + err
    here.wait_for_end("CANCELLED")
    saved = newest_checkpoint(here)
    assert saved >= 6
    assert f"checkpoint step-{saved} is complete" in output
    body = json.loads(there.output_of("status", JOB, "--json"))
    assert (body["state"], body["checkpoint"]["step"]) == ("CANCELLED", saved)
    here.assert_nothing_left()


def test_kubectl_shows_a_jobs_incidents_and_state(job: KubeNdctl) -> None:
    """A leader that cannot reach the API server keeps training and writes its events later."""
    job.submit_successfully(**LONG)
    job.wait_for_step(4)
    kill(job.rank_pid(3))
    job.wait_for_step(2, attempt=2)
    job.wait_until("its news", lambda: "Recovered" in reasons(job))
    assert reasons(job)[0] == "Started"
    assert {"Incident", "Recovering", "Recovered"} <= set(reasons(job))
    text = job.kubectl("describe", "pytorchjob", JOB)
    assert "rank-killed" in text.partition("Events:")[2]
    found = state_of(job)
    assert (found["state"], found["attempt"], found["steps"]) == ("RUNNING", "2", "5000")
    assert found["culprit"].startswith("rank 3 on node")

    job.testbed.stop_control_plane()
    here = max(job.losses())
    kill(job.rank_pid(1))
    job.wait_for_step(2, attempt=3)
    job.testbed.start_control_plane()
    job.wait_until("the late news", lambda: reasons(job).count("Recovered") == 2)
    job.wait_until("the late state", lambda: state_of(job)["attempt"] == "3")
    assert here
    assert job.status()["restarts"] == 2
    job.output_of("cancel", JOB)
    job.wait_until("its end", lambda: "Ended" in reasons(job))
    assert state_of(job)["state"] == "CANCELLED"


def test_the_progress_of_a_trainjob_is_posted_to_its_operator(
    job: KubeNdctl, tmp_path: Path
) -> None:
    """The variables are those of Kubeflow Trainer 2.2 with feature gate TrainJobStatus."""
    job, place = replace(job, kind="trainjob"), job.testbed.runs / "trainer"
    place.mkdir()
    with status_server(place, job.namespace, JOB) as server:
        for file in place.iterdir():
            file.chmod(0o644)
        output = ", ".join(f"{name}: {value!r}" for name, value in server.environ.items())
        job.submit_successfully(cluster__kubernetes__env=f"{{{output}}}")
        job.wait_for_end()
        job.wait_until("the last of it", lambda: server.taken[-1:] and percent(server) == 100)
    percents = [one["trainerStatus"]["progressPercentage"] for one in server.taken]
    assert percents == sorted(percents)
    last = server.taken[-1]["trainerStatus"]
    assert last["estimatedRemainingSeconds"] == 0
    assert {"name": "step", "value": "24"} in last["metrics"]


def test_a_collector_gets_the_spans_of_both_leaders_of_a_job(job: KubeNdctl) -> None:
    """The leader's pod has the variables of `cluster.kubernetes.env`, and so has the next pod."""
    with collecting() as collector:
        environ = f"{{OTEL_EXPORTER_OTLP_ENDPOINT: {collector.url!r}}}"
        job.submit_successfully(cluster__kubernetes__env=environ, **LONG)
        job.wait_for_step(2)
        kill(job.rank_pid(3))
        job.wait_for_step(2, attempt=2)
        job.wait_until("the incident's spans", lambda: "restart" in collector.names)
        kill(job.pids(job.leader())[0])
        job.wait_for_step(2, attempt=3)
        job.output_of("cancel", JOB)
        job.wait_until("the job's span", lambda: f"job {JOB}" in collector.names)
    span = collector.named(f"job {JOB}")
    assert attributes_of(span)["backend"] == "kubernetes"
    assert {one.trace_id for one in collector.spans} == {span.trace_id}
    attempts = {(one.name, one.span_id) for one in collector.spans if "attempt" in one.name}
    assert sorted(name for name, _ in attempts) == ["attempt 1", "attempt 2", "attempt 3"]


def percent(server: StatusServer) -> int:
    found: int = server.taken[-1]["trainerStatus"]["progressPercentage"]
    return found


# With fewer rights


def rules_without(*missing: tuple[str, str]) -> list[dict[str, Any]]:
    """Rules of the Role `ndctl-user` without some verbs."""
    (role,) = [
        one
        for one in yaml.safe_load_all((ROOT / "manifests" / "base" / "user.yaml").read_text())
        if one["kind"] == "Role"
    ]
    rules = []
    for rule in role["rules"]:
        for each in rule["resources"]:
            verbs = [one for one in rule["verbs"] if (one, each) not in missing]
            rules.append({**rule, "resources": [each], "verbs": verbs})
    return [rule for rule in rules if rule["verbs"]]


def user(job: KubeNdctl, folder: Path, *missing: tuple[str, str]) -> KubeNdctl:
    """A user on another machine who lacks some rights."""
    kubeconfig = job.testbed.as_user(rules_without(*missing), job.namespace)
    return replace(job.from_other_machine(folder), extra_environ={"KUBECONFIG": str(kubeconfig)})


def test_without_pods_exec_state_step_and_checkpoint_are_known_and_cancel_works(
    job: KubeNdctl, tmp_path: Path
) -> None:
    job.submit_successfully(train__steps="5000", checkpoint__every_steps="5")
    job.wait_for_step(12)
    dev = user(job, tmp_path / "dev", ("create", "pods/exec"), ("get", "pods/exec"))
    job.wait_until("the checkpoint", lambda: int(state_of(job)["checkpoint"] or 0) >= 5)
    done = dev("status", JOB, *THERE)
    assert (done.code, done.err) == (0, "")
    head = done.out.partition("\n")[0]
    assert head.startswith(f"{JOB}: RUNNING as of "), head
    assert re.search(f"; dev may not (get|create) pods/exec in namespace {NAMESPACE}", head)
    assert "kubectl create role" in done.out, "the command that grants the right"
    body = json.loads(dev.output_of("status", JOB, "--json"))
    assert (body["state"], body["attempt"]) == ("RUNNING", 1)
    assert body["step"] >= 5
    assert body["checkpoint"]["step"] >= 5
    assert "step " in dev.output_of("logs", JOB, "--tail", "3")

    done = dev("cancel", JOB)
    assert done.code == 0, done.err
    job.wait_for_end("CANCELLED")
    assert job.incidents() == []
    job.assert_nothing_left()


@pytest.mark.parametrize(("verb", "resource"), [("watch", "pods"), ("list", "events")])
def test_without_one_optional_right_a_job_is_submitted_seen_and_cancelled(
    job: KubeNdctl, tmp_path: Path, verb: str, resource: str
) -> None:
    dev = user(job, tmp_path / "dev", (verb, resource))
    words = ("--inventory", str(inventory(tmp_path)))
    # A user can only grant rights that they have, so the pods use an account of the site.
    job.testbed.kubectl("-n", job.namespace, "create", "serviceaccount", "ndctl-job")
    give(job, pod_rules())
    done = dev.submit(*words, cluster__kubernetes__service_account="ndctl-job", **LONG)
    assert done.code == 0, done.out + done.err
    shown: Callable[[], str] = lambda: dev.output_of("status", JOB).partition("\n")[0]  # noqa: E731
    job.wait_for_step(3)
    assert shown().startswith(f"{JOB}: RUNNING, "), shown()
    job.kubectl("patch", "pytorchjob", JOB, "--type=merge", "-p", SUSPEND)
    job.wait_until("no pods", lambda: not job.pods())
    assert "PENDING, " in shown()
    assert "is suspended" in shown()
    done = dev("cancel", JOB)
    assert done.code == 0, done.err
    job.assert_nothing_left()


SUSPEND = json.dumps({"spec": {"runPolicy": {"suspend": True}}})


def inventory(folder: Path) -> Path:
    """An inventory file for a user who may not list nodes."""
    file = folder / "inventory.yaml"
    file.write_text("{profile: cpu, hosts: 4, devices_per_host: 2}\n")
    return file


def pod_rules(*without: tuple[str, str]) -> list[dict[str, Any]]:
    """The rights that `ndctl render` gives a job's pods, without some; here for all jobs of the
    namespace."""
    wanted = [
        ("", "pods", ["get", "list", "watch", "delete"]),
        ("", "events", ["list", "create"]),
        ("", "configmaps", ["get", "patch"]),
        ("kubeflow.org", "pytorchjobs", ["get", "watch"]),
    ]
    found = []
    for group, resource, verbs in wanted:
        left = [verb for verb in verbs if (verb, resource) not in without]
        found.append({"apiGroups": [group], "resources": [resource], "verbs": left})
    return [rule for rule in found if rule["verbs"]]


def give(job: KubeNdctl, rules: list[dict[str, Any]]) -> None:
    """Gives the rules to the account of the pods."""
    version, named = {"apiVersion": "rbac.authorization.k8s.io/v1"}, {"name": "ndctl-job"}
    role = {**version, "kind": "Role", "metadata": named, "rules": rules}
    who = {"kind": "ServiceAccount", "name": "ndctl-job", "namespace": job.namespace}
    ref = {"kind": "Role", "name": "ndctl-job", "apiGroup": "rbac.authorization.k8s.io"}
    bound = {**version, "kind": "RoleBinding", "metadata": named}
    job.kubectl("delete", "role,rolebinding", "ndctl-job", "--ignore-not-found")
    job.testbed.apply(role, {**bound, "subjects": [who], "roleRef": ref}, namespace=job.namespace)


@pytest.mark.parametrize(
    "missing",
    [
        (("watch", "pods"),),
        (("list", "events"), ("create", "events")),
        (("watch", "pytorchjobs"), ("patch", "configmaps")),
    ],
    ids=["pods", "events", "job-and-state"],
)
def test_pods_that_lack_a_right_recover_and_name_it(
    job: KubeNdctl, missing: tuple[tuple[str, str], ...]
) -> None:
    """The follower's node is lost, because that needs most requests to the API server."""
    job.testbed.kubectl("-n", job.namespace, "create", "serviceaccount", "ndctl-job")
    give(job, pod_rules(*missing))
    account = {"cluster__kubernetes__service_account": "ndctl-job"}
    job.submit_successfully(**LONG, **account, cluster__kubernetes__force_delete_after="3")
    job.wait_for_step(4)
    leader = job.leader()
    (gone,) = set(job.hosts()) - {leader}
    job.testbed.lose_node(gone)
    job.wait_for_step(2, attempt=2)
    assert job.incidents() == [("host-lost", gone, None)]
    assert gone not in job.hosts()
    output = job.kubectl("logs", job.pod_of(leader))
    for verb, resource in missing:
        words = f"ndctl-job may not {verb} {resource}"
        assert words in output or (verb, resource) == ("list", "events"), output
    job.output_of("cancel", JOB)
