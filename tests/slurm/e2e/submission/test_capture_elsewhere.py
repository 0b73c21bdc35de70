"""The user's program is copied however the job gets its nodes, not only by `ndctl submit`."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.job import ROOT, processes_of, wait_for
from tests.slurm.e2e.submission.test_rendered_script import sbatch
from tests.slurm.e2e.submission.test_submit_here import allocation, wait_for_exit
from tests.slurm.e2e.two_node_job import NAME, Job
from tests.slurm.testbed import SlurmTestbed

pytestmark = [pytest.mark.slurm, pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture
def job(slurm: SlurmTestbed, tmp_path: Path) -> Iterator[Job]:
    found = Job(tmp_path / "runs", slurm)
    yield found
    slurm.restore()
    wait_for(lambda: not processes_of(found.run_dir), "the end of every process", 60)


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    """A module of the user's own package `trainer`, which prints where it is from."""
    (tmp_path / "home" / "trainer").mkdir(parents=True)
    (tmp_path / "home" / "trainer" / "task.py").write_text("print('task from', __file__)\n")
    run = {"module": "trainer.task", "workdir": str(tmp_path / "home")}
    cluster = {"backend": "slurm", "hosts": 2, "gpus_per_host": 1}
    path = tmp_path / "spec.yaml"
    path.write_text(json.dumps({"name": NAME, "run": run, "cluster": cluster}))
    return path


def assert_ranks_ran_the_copy(job: Job) -> None:
    wait_for(job.has_ended, "the end", 240)
    logs = [log.read_text() for log in job.run_dir.glob("logs/attempt-1/*/rank-*.log")]
    assert logs == [f"task from {job.run_dir}/capture-1/trainer/task.py\n"] * 2


def test_in_an_allocation(job: Job, spec: Path) -> None:
    with allocation(job, 2) as here:
        code, said = wait_for_exit(here.start("submit", str(spec), "--here"))
        assert code == 0, said
        assert_ranks_ran_the_copy(job)


def test_in_a_script_of_the_user(job: Job, spec: Path) -> None:
    agent = [sys.executable, "-m", "orchestrator", "agent", str(spec)]
    command = subprocess.list2cmdline([*agent, f"--run-root={job.run_root}"])
    script = spec.with_name("own.sh")
    script.write_text(
        "#!/bin/bash\n#SBATCH --nodes=2 --exclusive --requeue\n"
        f"srun --ntasks-per-node=1 --cpu-bind=none {command}\n"
    )
    sbatch(job, script, f"--chdir={ROOT}")
    assert_ranks_ran_the_copy(job)


def test_in_a_rendered_script(job: Job, spec: Path) -> None:
    done = job("render", str(spec))
    assert done.code == 0, done.err
    script = spec.with_name("job.sh")
    script.write_text(done.out)
    sbatch(job, script)
    assert_ranks_ran_the_copy(job)
