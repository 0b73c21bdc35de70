"""Jobs from `kubectl apply` or `ndctl submit` to their end, as seen from outside the cluster."""

import json
import re
from pathlib import Path

import pytest

from tests.e2e.job import wait_for
from tests.kubernetes.e2e.kube_job import JOB, LONG, NAMESPACE, STEPS, KubeNdctl, identity
from tests.kubernetes.testbed import KubeTestbed

pytestmark = [pytest.mark.kubernetes, pytest.mark.process, pytest.mark.timeout(1800)]

THERE = ("--backend", "kubernetes", "-n", NAMESPACE)


# In every run test_recovery.py has the losses of an applied job.
@pytest.mark.slow
def test_losses_of_an_applied_job_equal_those_of_the_trainer_alone(
    job: KubeNdctl, other_machine: KubeNdctl, reference: dict[int, float]
) -> None:
    """A second apply changes nothing. A user without the run volume sees the same job."""
    job.render_and_apply()
    job.wait_until("two pods", lambda: len(job.running()) == 2)
    before = job.running()
    assert all(
        line.endswith(("unchanged", "configured")) for line in job.render_and_apply().splitlines()
    )
    job.wait_for_end()
    other_machine.output_of("status", JOB, *THERE)
    _assert_the_same_is_seen(job, other_machine)
    assert {host: identity(pod) for host, pod in job.pods().items()} == before
    assert sorted(job.losses()) == list(STEPS)
    assert job.losses() == reference
    job.assert_all_samples_read_once()
    job.wait_until("the operator", lambda: job.conditions()[-1] == "Succeeded")
    # The pods are gone. They have written to the API server what a view needs.
    late = other_machine.from_other_machine(other_machine.run_root / "late")
    seen = json.loads(late.output_of("status", JOB, *THERE, "--json"))
    assert (seen["state"], seen["step"]) == ("SUCCEEDED", STEPS[-1])
    assert job.incidents() == []
    _assert_one_delete_takes_all_away(job)


def _assert_the_same_is_seen(job: KubeNdctl, other_machine: KubeNdctl) -> None:
    """A machine with the run volume and one without show the same."""
    for one in (other_machine, job):
        logs = one.output_of("logs", JOB)
        steps = [int(found) for found in re.findall(r"\[\S+ rank 0\] .* step (\d+)/24 loss", logs)]
        assert steps == list(STEPS), logs
        (listed,) = json.loads(one.output_of("list", "--json"))["jobs"]
        assert (listed["name"], listed["backend"]) == (JOB, "kubernetes")
        assert (listed["state"], listed["step"], listed["steps"]) == ("SUCCEEDED", 24, 24)
    for view in (("events", JOB), ("status", JOB), ("describe", JOB)):
        here, there = _lines(job.output_of(*view)), _lines(other_machine.output_of(*view))
        assert here == there, view
        assert view == ("events", JOB) or any(f"PyTorchJob {NAMESPACE}/{JOB}" in it for it in here)


def _lines(text: str) -> list[str]:
    """Lines without paths and ages, which differ between machines."""
    kept = [line for line in text.splitlines() if not re.search(r"\s/\S*/e2e|\bago\b", line)]
    return [" ".join(line.split()) for line in kept]


def _assert_one_delete_takes_all_away(job: KubeNdctl) -> None:
    job.kubectl("delete", "pytorchjob", JOB)

    def left() -> str:
        kinds = "pods,configmaps,secrets,services,pytorchjobs"
        return job.kubectl("get", kinds, "-l", f"ndctl.dev/job={JOB}", "-o", "name")

    job.wait_until("the garbage collector", lambda: not left())


@pytest.mark.slow
def test_two_submissions_are_one_job_and_cancel_writes_a_checkpoint(
    job: KubeNdctl, other_machine: KubeNdctl, tmp_path: Path
) -> None:
    """The job is cancelled from outside, resumes from its checkpoint, and is cancelled by a user
    with the run volume."""
    other_machine.submit_successfully(**LONG)
    job.wait_for_step(2)
    again = other_machine.submit(**LONG)
    assert again.code == 5, again.out + again.err
    assert len(job.pods()) == 2
    stranger = other_machine.from_other_machine(tmp_path / "stranger")
    seen = json.loads(stranger.output_of("status", JOB, *THERE, "--json"))
    assert (seen["state"], seen["attempt"], seen["steps"]) == ("RUNNING", 1, 5000)
    assert seen["step"] >= 2
    assert seen["hosts"] == job.hosts()
    assert seen["leader_alive"]
    assert "RUNNING" in stranger.output_of("list"), "a copy of its last known state is stored"
    _cancel(job, other_machine)
    saved = job.events("CheckpointSaved")[-1]["step"]
    assert saved >= seen["step"]

    other_machine.submit_successfully("--resume", **LONG)
    job.wait_until("the second launch", lambda: len(job.events("JobSubmitted")) == 2)
    job.wait_for_step(saved + 2, attempt=2)
    _cancel(job, job)
    last = job.events("CheckpointSaved")[-1]["step"]
    assert last >= saved + 2
    assert [one["step"] for one in job.events("TrainingResumed")] == [0, saved]
    assert sorted(job.losses()) == list(range(1, last + 1))
    job.assert_all_samples_read_once(last)


def _cancel(job: KubeNdctl, user: KubeNdctl) -> None:
    output = user.output_of("cancel", JOB)
    assert "CANCELLED" in output, output
    assert job.final_state() == "CANCELLED"
    assert user.state() == "CANCELLED"
    assert job.incidents() == []
    job.assert_nothing_left()


@pytest.mark.slow
def test_a_pending_job_says_why_it_waits_and_is_cancelled(
    job: KubeNdctl, other_machine: KubeNdctl, kube: KubeTestbed
) -> None:
    manifest = job.render_to_file()
    # All nodes are cordoned after rendering; `submit` would warn about them.
    for node in kube.nodes:
        kube.kubectl("cordon", node)
    kube.kubectl("apply", "-f", str(manifest))
    job.wait_until("pods", lambda: len(kube.phases(namespace=NAMESPACE)) == 2)

    def waits() -> bool:
        return "Unschedulable" in other_machine.output_of("status", JOB, *THERE)

    wait_for(waits, "the scheduler", 300.0)
    assert json.loads(other_machine.output_of("status", JOB, "--json"))["state"] == "PENDING"
    other_machine.output_of("cancel", JOB)
    assert other_machine.state() == "CANCELLED"
    assert kube.phases(namespace=NAMESPACE) == {}
    suspended = kube.get("pytorchjobs", JOB, NAMESPACE)
    assert suspended["spec"]["runPolicy"]["suspend"] is True
    assert "ndctl.dev/cancelled-by" in suspended["metadata"]["annotations"]
    assert "PENDING" not in other_machine.output_of("list", *THERE)


@pytest.mark.slow
def test_follow_shows_the_progress_of_a_job(job: KubeNdctl, tmp_path: Path) -> None:
    follower = job.from_other_machine(tmp_path / "follower").submit_and_follow()
    output, err = follower.communicate(timeout=1200)
    assert follower.returncode == 0, output + err + job.failure_report()
    assert "step 24/24" in output
    assert "checkpoint step-24 is complete" in output
