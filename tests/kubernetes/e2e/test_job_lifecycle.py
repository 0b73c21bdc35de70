"""From `kubectl apply` or `ndctl submit` to the end, as seen by who is not in the cluster."""

import json
import re
from pathlib import Path

import pytest

from tests.e2e.job import wait_for
from tests.kubernetes.e2e.kube_job import JOB, LONG, NAMESPACE, STEPS, KubeNdctl, identity
from tests.kubernetes.testbed import KubeTestbed

pytestmark = [
    pytest.mark.kubernetes,
    pytest.mark.process,
    pytest.mark.timeout(1800),
]

THERE = ("--backend", "kubernetes", "-n", NAMESPACE)


def test_losses_of_an_applied_job_equal_those_of_the_local_backend(
    job: KubeNdctl, elsewhere: KubeNdctl, reference: dict[int, float]
) -> None:
    """Applied twice it is one job; who has not mounted its volume sees it all the same."""
    job.applied()
    job.until("two pods", lambda: len(job.running()) == 2)
    before = job.running()
    assert all(line.endswith(("unchanged", "configured")) for line in job.applied().splitlines())
    job.until_ended()
    elsewhere.told("status", JOB, *THERE)
    _assert_the_same_is_seen(job, elsewhere)
    assert {host: identity(pod) for host, pod in job.pods().items()} == before
    assert sorted(job.losses()) == list(STEPS)
    assert job.losses() == reference
    job.assert_all_samples_read_once()
    job.until("the operator", lambda: job.conditions()[-1] == "Succeeded")
    # The pods have gone, and have said before what a view needs.
    late = elsewhere.from_elsewhere(elsewhere.run_root / "late")
    seen = json.loads(late.told("status", JOB, *THERE, "--json"))
    assert (seen["state"], seen["step"]) == ("SUCCEEDED", STEPS[-1])
    assert job.incidents() == []
    _assert_one_delete_takes_all_away(job)


def _assert_the_same_is_seen(job: KubeNdctl, elsewhere: KubeNdctl) -> None:
    """From a machine with the run volume and from one without."""
    for one in (elsewhere, job):
        logs = one.told("logs", JOB)
        steps = [int(found) for found in re.findall(r"\[\S+ rank 0\] .* step (\d+)/24 loss", logs)]
        assert steps == list(STEPS), logs
    for view in (("events", JOB), ("status", JOB), ("describe", JOB), ("list",)):
        here, there = _lines(job.told(*view)), _lines(elsewhere.told(*view))
        assert here == there, view
        assert view == ("events", JOB) or any(f"PyTorchJob {NAMESPACE}/{JOB}" in it for it in here)


def _lines(text: str) -> list[str]:
    """Less where it was read, and when."""
    kept = [line for line in text.splitlines() if not re.search(r"\s/\S*/e2e|\bago\b", line)]
    return [" ".join(line.split()) for line in kept]


def _assert_one_delete_takes_all_away(job: KubeNdctl) -> None:
    job.kubectl("delete", "pytorchjob", JOB)

    def left() -> str:
        kinds = "pods,configmaps,secrets,services,pytorchjobs"
        return job.kubectl("get", kinds, "-l", f"ndctl.dev/job={JOB}", "-o", "name")

    job.until("the garbage collector", lambda: not left())


@pytest.mark.slow
def test_two_submissions_are_one_job_and_cancel_writes_a_checkpoint(
    job: KubeNdctl, elsewhere: KubeNdctl, tmp_path: Path
) -> None:
    """Seen and cancelled from outside; then it resumes from its checkpoint, and is cancelled at
    the volume."""
    elsewhere.submitted(**LONG)
    job.until_step(2)
    again = elsewhere.submit(**LONG)
    assert again.code == 5, again.out + again.err
    assert len(job.pods()) == 2
    stranger = elsewhere.from_elsewhere(tmp_path / "stranger")
    seen = json.loads(stranger.told("status", JOB, *THERE, "--json"))
    assert (seen["state"], seen["attempt"], seen["steps"]) == ("RUNNING", 1, 5000)
    assert seen["step"] >= 2
    assert seen["hosts"] == job.hosts()
    assert seen["leader_alive"]
    assert "RUNNING" in stranger.told("list"), "a copy of what is known of it is there"
    _cancel(job, elsewhere)
    saved = job.events("CheckpointSaved")[-1]["step"]
    assert saved >= seen["step"]

    elsewhere.submitted("--resume", **LONG)
    job.until("the second launch", lambda: len(job.events("JobSubmitted")) == 2)
    job.until_step(saved + 2, attempt=2)
    _cancel(job, job)
    last = job.events("CheckpointSaved")[-1]["step"]
    assert last >= saved + 2
    assert [one["step"] for one in job.events("TrainingResumed")] == [0, saved]
    assert sorted(job.losses()) == list(range(1, last + 1))
    job.assert_all_samples_read_once(last)


def _cancel(job: KubeNdctl, user: KubeNdctl) -> None:
    said = user.told("cancel", JOB)
    assert "CANCELLED" in said, said
    assert job.ending() == "CANCELLED"
    assert user.state() == "CANCELLED"
    assert job.incidents() == []
    job.assert_nothing_left()


@pytest.mark.slow
def test_a_pending_job_says_why_it_waits_and_is_cancelled(
    job: KubeNdctl, elsewhere: KubeNdctl, kube: KubeTestbed
) -> None:
    manifest = job.rendered()
    # Since then all nodes were taken away, which `submit` would warn of.
    for node in kube.nodes:
        kube.kubectl("cordon", node)
    kube.kubectl("apply", "-f", str(manifest))
    job.until("pods", lambda: len(kube.phases(namespace=NAMESPACE)) == 2)

    def waits() -> bool:
        return "Unschedulable" in elsewhere.told("status", JOB, *THERE)

    wait_for(waits, "the scheduler", 300.0)
    assert json.loads(elsewhere.told("status", JOB, "--json"))["state"] == "PENDING"
    elsewhere.told("cancel", JOB)
    assert elsewhere.state() == "CANCELLED"
    assert kube.phases(namespace=NAMESPACE) == {}
    suspended = kube.get("pytorchjobs", JOB, NAMESPACE)
    assert suspended["spec"]["runPolicy"]["suspend"] is True
    assert "ndctl.dev/cancelled-by" in suspended["metadata"]["annotations"]
    assert "PENDING" not in elsewhere.told("list", *THERE)


@pytest.mark.slow
def test_follow_shows_the_progress_of_a_job(job: KubeNdctl, tmp_path: Path) -> None:
    follower = job.from_elsewhere(tmp_path / "follower").followed()
    said, err = follower.communicate(timeout=1200)
    assert follower.returncode == 0, said + err + job.story()
    assert "step 24/24" in said
    assert "checkpoint step-24 is complete" in said
