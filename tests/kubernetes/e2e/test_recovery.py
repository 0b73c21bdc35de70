"""A job loses ranks, processes and pods; the losses equal those of an uninterrupted run."""

import pytest

from tests.e2e.job import kill
from tests.kubernetes.e2e.kube_job import KubeNdctl, identity

pytestmark = [pytest.mark.kubernetes, pytest.mark.process, pytest.mark.timeout(1800)]


def test_a_job_recovers_from_a_lost_rank_lost_processes_and_a_lost_pod(
    job: KubeNdctl, reference: dict[int, float]
) -> None:
    """A rank is killed, then a pod's first process, then a pod is deleted with kubectl."""
    job.submit_successfully()
    job.wait_for_step(2)
    leader = job.leader()
    (other,) = (host for host in job.hosts() if host != leader)
    before = job.running()
    kill(job.rank_pid(3))
    job.wait_for_step(10, attempt=2)
    # Recovery happened inside the pods: no pod was replaced.
    assert job.running() == before

    kill(job.pids(other)[0])
    job.wait_for_step(10, attempt=3)
    (second,) = (host for host in job.hosts() if host != leader)
    kept = job.pods()
    assert identity(kept[leader]) == before[leader]
    assert identity(kept[second]) not in before.values()

    job.kubectl("delete", "pod", job.pod_of(second), "--wait=false")
    job.wait_for_end()

    assert job.losses() == reference
    job.assert_all_samples_read_once()
    killed, gone = job.incidents()
    assert (killed[0], killed[2]) == ("rank-killed", 3)
    # The processes ended on a node that works: its next pod started in the same boot.
    assert gone == ("agent-lost", None, None)
    # A deleted pod is no fault, so it does not count as a restart.
    assert job.status()["restarts"] == 2
    assert identity(job.pods()[leader]) == before[leader]
    over = ["Created", "Succeeded"]  # The operator sets these when all pods have ended.
    job.wait_until("its end for Kubernetes", lambda: job.conditions() == over)


@pytest.mark.slow
def test_pods_evicted_without_a_warning_spend_no_restart_budget(
    job: KubeNdctl, reference: dict[int, float]
) -> None:
    """First a follower's pod, then the leader's. One counted restart would end the job."""
    job.submit_successfully(resilience__max_restarts="0")
    job.wait_for_step(9)
    leader = job.leader()
    (other,) = (host for host in job.hosts() if host != leader)
    job.testbed.evict(job.pod_of(other), job.namespace)
    job.wait_for_step(9, attempt=2)
    job.testbed.evict(job.pod_of(leader), job.namespace)
    job.wait_for_end()
    assert job.losses() == reference
    assert len(job.events("LeaderStarted")) == 2
    # The new pod may register before the leader notices that the old one is silent.
    events = (*job.events("AgentLost"), *job.events("AgentRegistered"))
    of_other = [event["taken"] for event in events if event["host"] == other]
    assert "low on resource: memory" in " ".join(of_other)
    assert "low on resource: memory" in job.events("LeaderStarted")[1]["taken"]
    assert (job.incidents(), job.status()["restarts"]) == ([], 0)
