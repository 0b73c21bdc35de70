"""A job in an allocation of submitit's executor, on real Slurm daemons."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.job import ROOT, SPEC, processes_of, wait_for
from tests.slurm.e2e.submission.test_rendered_script import SAVES, job_fields
from tests.slurm.e2e.two_node_job import Job, uninterrupted
from tests.slurm.testbed import SlurmTestbed

pytestmark = [pytest.mark.slurm, pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(600)]
EXAMPLE = ROOT / "examples" / "submitit_job.py"


@pytest.fixture
def job(slurm: SlurmTestbed, tmp_path: Path) -> Iterator[Job]:
    found = Job(tmp_path / "runs", slurm)
    yield found
    slurm.restore()
    assert not processes_of(found.run_dir)


def from_python(job: Job, folder: Path, hosts: str) -> tuple[str, str]:
    """Runs the example in its own folder; returns the final state and output of its Slurm job."""
    sets = [f"--set={key}={value}" for key, value in {**SAVES, "cluster.hosts": hosts}.items()]
    ours = str(Path(sys.executable).parent)
    environ = {**job.environ, "PATH": f"{ours}:{os.environ['PATH']}"}
    argv = [sys.executable, str(EXAMPLE), str(SPEC), *sets, f"--run-root={job.run_root}"]
    done = subprocess.run(
        argv, cwd=folder, env=environ, capture_output=True, text=True, timeout=60, check=True
    )
    words = re.fullmatch(r"Slurm job (\d+); its output: (.+)\n", done.stdout)
    assert words, done.stdout

    def state() -> str:
        return job_fields(job.slurm, words[1])["JobState"]

    wait_for(
        lambda: state() not in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING"), "its end", 300
    )
    output = Path(words[2])
    return state(), output.read_text() + output.with_suffix(".err").read_text()


def test_a_job_trains_on_the_nodes_of_the_executor(job: Job, tmp_path: Path) -> None:
    state, message = from_python(job, tmp_path, "2")
    assert state == "COMPLETED", message
    assert "e2e: SUCCEEDED, all ranks finished in attempt 1" in message
    assert job.losses() == uninterrupted(**SAVES)


def test_a_failed_job_ends_the_slurm_job_as_failed(job: Job, tmp_path: Path) -> None:
    state, message = from_python(job, tmp_path, "9")
    assert state == "FAILED", message
    assert "cluster.hosts" in message
