"""A job under the projects' own operators, if `KUBE_OPERATORS` names them: one test for each fault.

`../traces` has recordings of what an operator does to pods.
"""

import contextlib
import json
from dataclasses import replace
from functools import partial

import pytest

from tests.e2e.job import kill
from tests.kubernetes import real_operators
from tests.kubernetes.e2e.kube_job import RESOURCES, KubeNdctl, controller, identity

pytestmark = [
    pytest.mark.kubernetes,
    pytest.mark.process,
    pytest.mark.slow,
    pytest.mark.timeout(1800),
]
DONE = {"pytorchjob": "Succeeded", "jobset": "Completed", "trainjob": "Complete"}
SUSPEND = {"pytorchjob": ("runPolicy", "suspend"), "jobset": ("suspend",), "trainjob": ("suspend",)}
FORCED = {"cluster__kubernetes__force_delete_after": "3"}


@pytest.fixture(params=[operator.kind for operator in real_operators.OPERATORS])
def real(request: pytest.FixtureRequest) -> KubeNdctl:
    """A job of each kind; skips if its own operator is not available."""
    kind: str = request.param
    if kind not in real_operators.kinds():
        pytest.skip(
            f"{real_operators.NOT_RUN}KUBE_OPERATORS names no folder with the operator of {kind}"
        )
    job: KubeNdctl = request.getfixturevalue("job")
    return replace(job, kind=kind.lower())


def other(job: KubeNdctl) -> str:
    """The host that is not the leader's."""
    (host,) = set(job.hosts()) - {job.leader()}
    return host


def assert_ends_like_uninterrupted(job: KubeNdctl, reference: dict[int, float]) -> None:
    job.wait_for_end()
    assert job.losses() == reference
    job.assert_all_samples_read_once()
    job.wait_until("its end for Kubernetes", lambda: DONE[job.kind] in job.conditions())


def test_a_job_recovers_from_a_killed_rank(real: KubeNdctl, reference: dict[int, float]) -> None:
    """Recovery happens inside the pods, so the operator does not notice it."""
    real.submit_successfully()
    real.wait_for_step(3)
    before = real.running()
    kill(real.rank_pid(3))
    real.wait_for_step(9, attempt=2)
    assert real.running() == before
    assert_ends_like_uninterrupted(real, reference)
    (killed,) = real.incidents()
    assert (killed[0], killed[2]) == ("rank-killed", 3)


def test_a_job_recovers_from_a_pod_whose_processes_are_killed(
    real: KubeNdctl, reference: dict[int, float]
) -> None:
    """The operator creates a new pod, which joins the pod that stayed."""
    real.submit_successfully()
    real.wait_for_step(3)
    leader, gone, before = real.leader(), other(real), real.running()
    kill(real.pids(gone)[0])
    real.wait_for_step(9, attempt=2)
    after = real.running()
    assert after[leader] == before[leader]
    assert after[other(real)] not in before.values()
    assert_ends_like_uninterrupted(real, reference)


def test_a_job_recovers_from_a_deleted_pod(real: KubeNdctl, reference: dict[int, float]) -> None:
    real.submit_successfully()
    real.wait_for_step(3)
    leader, gone = real.leader(), other(real)
    before = identity(real.pods()[leader])
    real.kubectl("delete", "pod", real.pod_of(gone), "--wait=false")
    real.wait_for_step(9, attempt=2)
    assert identity(real.pods()[leader]) == before
    assert_ends_like_uninterrupted(real, reference)
    assert real.incidents() == []


def test_a_job_recovers_from_a_lost_node(real: KubeNdctl, reference: dict[int, float]) -> None:
    """Its pod stays Terminating until it is force-deleted: by the leader for a PyTorchJob, by
    ndctl's controller for the other kinds."""
    with contextlib.nullcontext() if real.kind == "pytorchjob" else controller(real):
        real.submit_successfully(**FORCED)
        real.wait_for_step(9)
        leader, gone = real.leader(), other(real)
        real.testbed.lose_node(gone)
        real.wait_for_step(10, attempt=2)
        assert real.leader() == leader
        assert gone not in real.hosts()
        assert_ends_like_uninterrupted(real, reference)
    assert real.incidents() == [("host-lost", gone, None)]


def test_a_job_is_suspended_and_resumed(real: KubeNdctl, reference: dict[int, float]) -> None:
    """All pods save a checkpoint and end; new pods resume from it."""
    real.submit_successfully()
    real.wait_for_step(3)
    before = set(real.running().values())
    suspend(real, holds=True)
    real.wait_until("no pods", lambda: not real.pods())
    suspend(real, holds=False)
    real.wait_until("new pods", partial(_are_new, real, before))
    assert_ends_like_uninterrupted(real, reference)
    assert real.incidents() == []


def suspend(job: KubeNdctl, *, holds: bool) -> None:
    output: object = holds
    for word in reversed(SUSPEND[job.kind]):
        output = {word: output}
    patch = json.dumps({"spec": output})
    job.kubectl("patch", RESOURCES[job.kind], "e2e", "--type=merge", "-p", patch)


def _are_new(job: KubeNdctl, before: set[tuple[str, int]]) -> bool:
    now = set(job.running().values())
    return len(now) == 2 and not now & before
