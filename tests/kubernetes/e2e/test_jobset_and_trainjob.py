"""A lost pod of a JobSet or TrainJob is replaced like a pod of a PyTorchJob."""

from dataclasses import replace

import pytest

from tests.kubernetes.e2e.kube_job import KubeNdctl, identity

pytestmark = [
    pytest.mark.kubernetes,
    pytest.mark.process,
    pytest.mark.slow,
    pytest.mark.timeout(1800),
]


@pytest.mark.parametrize(
    ("kind", "done"),
    [("jobset", "Completed"), ("trainjob", "Complete")],
    ids=["jobset", "trainjob"],
)
def test_a_job_of_each_kind_ends_as_if_no_pod_had_been_lost(
    job: KubeNdctl, reference: dict[int, float], kind: str, done: str
) -> None:
    job = replace(job, kind=kind)
    job.render_and_apply()
    job.wait_for_step(10)
    leader = job.leader()
    (other,) = (host for host in job.hosts() if host != leader)
    before = identity(job.pods()[leader])
    job.kubectl("delete", "pod", job.pod_of(other), "--wait=false")
    job.wait_for_step(18, attempt=2)
    assert identity(job.pods()[leader]) == before
    job.wait_for_end()

    assert job.losses() == reference
    job.assert_all_samples_read_once()
    assert job.incidents() == []
    job.wait_until("its end for Kubernetes", lambda: done in job.conditions())
