"""The script of `ndctl render`, submitted with sbatch, is a job like one of `ndctl submit`."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.job import SPEC, processes_of, submit_args, wait_for
from tests.slurm.e2e.two_node_job import NAME, SLOW_STEPS, Job, uninterrupted
from tests.slurm.testbed import SlurmTestbed
from tests.testbeds import run_within

pytestmark = [pytest.mark.slurm, pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(900)]

SAVES = {**SLOW_STEPS, "checkpoint.every_steps": "4"}
RELATIVE = {**SAVES, "data.files": "orchestrator/contract/*.py"}
"""A path relative to the folder in which the script is rendered."""


def rendered(job: Job, folder: Path, **options: str) -> Path:
    """Writes the script to a folder that is not the run directory nor the current directory."""
    done = job("render", *submit_args("--backend=slurm", **options)[1:])
    assert done.code == 0, done.err
    folder.mkdir(exist_ok=True)
    script = folder / "job.sh"
    script.write_text(done.out)
    return script


def sbatch(job: Job, script: Path, *options: str) -> str:
    """Submits the script from its folder, with a user's environment; returns the Slurm job id."""
    script_folder = () if any(one.startswith("--chdir") for one in options) else (script.parent,)
    chdir = [f"--chdir={folder}" for folder in script_folder]
    argv = ["sbatch", "--parsable", *chdir, *options, str(script)]
    done = run_within(argv, {**job.environ, "NDCTL_RUN_ROOT": ""}, 60)
    assert done.code == 0, done.err
    return done.out.strip()


def job_fields(slurm: SlurmTestbed, job_id: str) -> dict[str, str]:
    words = slurm.output_of("scontrol", "show", "job", "-o", job_id).split("\n")[0].split()
    pairs = (word.partition("=") for word in words if "=" in word)
    return {key: value for key, _, value in pairs}


def test_a_rendered_script_that_a_person_submits_is_an_ordinary_job(
    job: Job, tmp_path: Path
) -> None:
    script = rendered(job, tmp_path / "elsewhere", **RELATIVE)
    job_id = sbatch(job, script)
    job.wait_for_step(3)
    assert f"{NAME} " in job("list").out
    assert job.status()["scheduler"] == f"Slurm job {job_id}"
    agents = [line for line in processes_of(job.run_dir).values() if "slurm_task" in line]
    assert agents
    assert not [line for line in agents if "submitit" in line]

    # The job name exists: the error is in the output file, and the first job is unchanged.
    second = sbatch(job, script, "--nodes=2", "--output=%j.txt", "--oversubscribe")
    job.slurm.output_of("scontrol", "requeue", job_id)
    output_file = script.parent / f"{second}.txt"
    refused = f"job {NAME} already exists in {job.run_dir}: Slurm job {job_id} is "
    wait_for(
        lambda: output_file.exists() and refused in output_file.read_text(), "the refusal", 240
    )
    wait_for(lambda: job_fields(job.slurm, second)["ExitCode"] == "5:0", "its exit code", 60)

    job.wait_for_step(10, attempt=2)
    assert job_fields(job.slurm, job_id)["Restarts"] == "1"
    done = job("cancel", NAME)
    assert (done.code, "CANCELLED" in done.out) == (0, True), done.out + done.err
    job.slurm.wait_for("an empty queue", lambda: not job.slurm.output_of("squeue", "-h"))
    third = sbatch(job, script, "--output=%j.txt")
    output_file = script.parent / f"{third}.txt"
    wait_for(
        lambda: output_file.exists() and "--resume" in output_file.read_text(), "the refusal", 120
    )

    done = job("submit", str(SPEC), "--resume", *_sets(RELATIVE), "--backend=slurm", "--follow")
    assert done.code == 0, done.out + done.err
    assert job.losses() == uninterrupted(**RELATIVE)
    job.wait_until_gone()


def _sets(options: dict[str, str]) -> list[str]:
    return [f"--set={key}={value}" for key, value in options.items()]


@dataclass(frozen=True)
class Element(Job):
    """The job of one element of an array or of a sweep."""

    task: int | str = 0

    @property
    def run_dir(self) -> Path:
        return self.run_root / f"{NAME}-{self.task}"

    def status(self) -> dict[str, Any]:
        body: dict[str, Any] = json.loads(self("status", self.run_dir.name, "--json").out)
        return body


@pytest.fixture
def elements(slurm: SlurmTestbed, tmp_path: Path) -> Iterator[list[Element]]:
    found = [Element(tmp_path / "runs", slurm, task=task) for task in range(3)]
    yield found
    slurm.restore()


def test_each_task_of_an_array_is_a_job_with_its_number(
    elements: list[Element], tmp_path: Path
) -> None:
    """The id of the last element is that of the array, with which Slurm selects all elements."""
    slurm, (first, second, last) = elements[0].slurm, elements
    array = sbatch(first, rendered(first, tmp_path / "elsewhere", **SAVES), "--array=0-2%2")
    first.wait_for_step(3)
    second.wait_for_step(3)
    assert not (last.run_dir / "journal.jsonl").exists(), "two at a time"
    assert job_fields(slurm, f"{array}_1")["Comment"] == "ndctl"
    assert f"Slurm job {array}_1" in first("status", f"{NAME}-1").out

    done = first("cancel", f"{NAME}-1")
    assert done.code == 0, done.out + done.err
    last.wait_for_step(3)
    slurm.output_of(
        "scancel", "--signal=USR1", f"{array}_2"
    )  # it has itself queued again, and it alone
    last.wait_until("its next run", lambda: len(last.events("LeaderStarted")) == 2, 300)
    for one in (first, last):
        wait_for(one.has_ended, f"the end of element {one.task}", 400)
        assert one.losses() == uninterrupted(**SAVES)
    states = [one.actions_of_kind("EndJob")[-1]["state"] for one in elements]
    assert states == ["SUCCEEDED", "CANCELLED", "SUCCEEDED"]
    assert [len(one.events("LeaderStarted")) for one in elements] == [1, 1, 2]
    slurm.wait_for("an empty queue", lambda: not slurm.output_of("squeue", "-h"))
    assert not [line for one in elements for line in processes_of(one.run_dir).values()]
