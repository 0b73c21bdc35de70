"""Fixtures: a job on the shared cluster, and the losses of an uninterrupted run of its spec."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.job import TP, losses_without_ndctl
from tests.kubernetes.e2e.kube_job import KubeNdctl, job_on
from tests.kubernetes.testbed import KubeTestbed


@pytest.fixture
def job(kube: KubeTestbed, tmp_path: Path) -> Iterator[KubeNdctl]:
    """The job as seen by a user who has mounted the run volume."""
    with job_on(kube, kube.runs) as job:
        yield job


@pytest.fixture
def other_machine(job: KubeNdctl, tmp_path: Path) -> KubeNdctl:
    """The same job, seen from a machine that has no run volume and no record of the job."""
    return job.from_other_machine(tmp_path / "elsewhere")


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """Losses of the same spec without ndctl."""
    return losses_without_ndctl(tmp_path_factory, **TP)
