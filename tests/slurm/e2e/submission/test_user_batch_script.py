"""A user's own batch script with `srun ndctl agent SPEC`, on real Slurm daemons."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.job import ROOT, SPEC, processes_of, wait_for
from tests.slurm.e2e.submission.test_rendered_script import SAVES, job_fields, sbatch
from tests.slurm.e2e.two_node_job import NAME, Job, uninterrupted
from tests.slurm.testbed import SlurmTestbed

pytestmark = [pytest.mark.slurm, pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(900)]

EXAMPLE = ROOT / "examples" / "own-batch-script.sh"


@pytest.fixture
def own(slurm: SlurmTestbed, tmp_path: Path) -> Iterator[Job]:
    job = Job(tmp_path / "runs", slurm)
    yield job
    slurm.restore()
    assert not processes_of(job.run_dir)


def script(job: Job, folder: Path, srun: str = "", *agent: str) -> Path:
    """The example script with another spec and other options of srun and ndctl."""
    sets = [f"--set={key}={value}" for key, value in SAVES.items()]
    root = f"--run-root={job.run_root}"
    ndctl = " ".join(
        [sys.executable, "-m", "orchestrator", "agent", str(SPEC), *sets, root, *agent]
    )
    text = EXAMPLE.read_text()
    assert text.count("ndctl agent examples/slurm.yaml\n") == 1
    assert text.count("--ntasks-per-node=1") == 1
    text = text.replace("ndctl agent examples/slurm.yaml", ndctl)
    text = text.replace("--ntasks-per-node=1", srun or "--ntasks-per-node=1")
    folder.mkdir(exist_ok=True)
    (folder / "own.sh").write_text(f"{text}echo after srun: $?\n")
    return folder / "own.sh"


def submitted(job: Job, path: Path) -> tuple[str, Path]:
    """Submits the script; returns the id of the Slurm job and its output file."""
    job_id = sbatch(job, path, f"--chdir={ROOT}", f"--output={path.parent}/%j.txt")
    return job_id, path.parent / f"{job_id}.txt"


def test_a_users_own_script_survives_a_lost_node(own: Job, tmp_path: Path) -> None:
    path = script(own, tmp_path / "scripts")
    job_id, output = submitted(own, path)
    own.wait_for_step(6)
    assert job_fields(own.slurm, job_id)["JobName"] == "mine"
    message = own("status", NAME).out
    assert f"Slurm job {job_id}" in message
    agents = [one for one in processes_of(own.run_dir).values() if "slurm_task" in one]
    assert len([one for one in agents if "srun" not in one]) == 2, agents

    own.slurm.kill_node("node2")
    own.wait_until("the next run", lambda: len(own.events("LeaderStarted")) == 2, 300)
    wait_for(own.has_ended, "the end of the job", 300)
    assert job_fields(own.slurm, job_id)["Restarts"] == "1"
    assert own.status()["state"] == "SUCCEEDED"
    assert own.losses() == uninterrupted(**SAVES)
    wait_for(lambda: "after srun: 0" in output.read_text(), "the line after srun", 60)

    # The job name exists: one task reports it, and every task exits.
    second, output = submitted(own, path)
    wait_for(lambda: job_fields(own.slurm, second)["JobState"] == "COMPLETED", "the refusal", 120)
    message = output.read_text()
    refused = f"error: job {NAME} already exists in {own.run_dir} and ended SUCCEEDED"
    assert message.count(refused) == 1, message
    assert "--resume continues from its newest checkpoint" in message
    path = script(own, tmp_path / "scripts", "", "--resume", "--set=train.steps=40")
    third, output = submitted(own, path)
    wait_for(lambda: len(own.events("JobSubmitted")) == 2, "the job to start", 120)
    wait_for(own.has_ended, "the end of the longer job", 300)
    assert max(own.losses()) == 40
    assert own.status()["scheduler"] == f"Slurm job {third}"


@pytest.mark.parametrize(
    ("srun", "agent", "message"),
    [
        ("--ntasks-per-node=2", (), "srun started 4 agents on 2 nodes"),
        ("--nodes=1 --ntasks=1", (), "srun started 1 agents on 1 nodes, but Slurm job"),
        ("", ("--set=train.steps=0",), "--set train.steps: must be at least 1, got 0"),
        ("", ("--set=cluster.hosts=3",), "cluster.hosts is 3, but the allocation has 2 nodes"),
    ],
)
def test_an_impossible_start_is_reported_once_and_ends_the_step(
    own: Job, tmp_path: Path, srun: str, agent: tuple[str, ...], message: str
) -> None:
    job_id, output = submitted(own, script(own, tmp_path / "scripts", srun, *agent))
    wait_for(lambda: job_fields(own.slurm, job_id)["JobState"] == "COMPLETED", "the end", 120)
    assert output.read_text().count(message) == 1, output.read_text()
    assert not (own.run_dir / "journal.jsonl").exists()
