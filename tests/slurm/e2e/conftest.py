"""Fixtures: clusters, jobs on them, and an uninterrupted run with which other runs are compared."""

import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.job import TP, WAIT_S, processes_of, submit_args, wait_for
from tests.slurm.e2e.slurm_job import SITE, SlurmNdctl
from tests.slurm.e2e.two_node_job import TESTBED_KNOBS, Job, job_on
from tests.slurm.testbed import SlurmTestbed, running_testbed


@pytest.fixture
def ndctl(slurm: SlurmTestbed, tmp_path: Path) -> Iterator[SlurmNdctl]:
    command = SlurmNdctl(tmp_path / "runs", slurm)
    yield command
    if command.run_dir.exists():
        if processes_of(command.run_dir):
            command("cancel", "e2e")
        command.assert_nothing_left()


@pytest.fixture(scope="session")
def finished(_shared: SlurmTestbed, tmp_path_factory: pytest.TempPathFactory) -> SlurmNdctl:
    """The finished, uninterrupted run, with the keys of a site."""
    _shared.restore()
    command = SlurmNdctl(tmp_path_factory.mktemp("finished") / "runs", _shared)
    words = submit_args("--backend", "slurm", "--follow", **TP, **SITE)
    following = command.start(*words)
    command.wait_for_step(step=2)
    command.save_rank_environ()
    out, err = following.communicate(timeout=WAIT_S)
    assert following.returncode == 0, out + err
    # The Slurm job ends after ndctl's job. A restore before that would cancel it.
    wait_for(lambda: not _shared.output_of("squeue", "-h"), "the Slurm job to end")
    command.save_slurm_records()
    return command


@pytest.fixture(scope="session")
def cluster(slurm_available: None) -> Iterator[SlurmTestbed]:
    """A second cluster, with preemption and Slurm's default kill wait."""
    with running_testbed(nodes=2, gpus=1, knobs=TESTBED_KNOBS) as testbed:
        yield testbed


@pytest.fixture
def job(cluster: SlurmTestbed, tmp_path: Path) -> Iterator[Job]:
    cluster.restore()
    with job_on(cluster, tmp_path / "runs") as job:
        yield job


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A small file system, which is mounted before the nodes of a cluster start."""
    folder = Path(tempfile.mkdtemp(prefix="ndctl-small-", dir=tmp_path))
    mount = ["mount", "-t", "tmpfs", "-o", "size=256m", "none", str(folder)]
    tried = subprocess.run(mount, capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"a file system cannot be mounted here: {tried.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
