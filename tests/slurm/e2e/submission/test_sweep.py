"""`ndctl submit --sweep` on real Slurm daemons: one job per combination, a few at a time."""

import json
from pathlib import Path

import pytest

from tests.e2e.job import SPEC, processes_of, wait_for
from tests.slurm.e2e.submission.test_rendered_script import Element, job_fields
from tests.slurm.e2e.two_node_job import SLOW_STEPS, Job
from tests.slurm.testbed import SlurmTestbed

pytestmark = [pytest.mark.slurm, pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(900)]


def test_a_sweep_runs_one_after_the_other_and_is_cancelled_by_its_group(
    slurm: SlurmTestbed, tmp_path: Path
) -> None:
    ndctl = Job(tmp_path / "runs", slurm)
    first, second, third = (
        Element(ndctl.run_root, slurm, task=task) for task in ("seed-1", "seed-2", "seed-3")
    )
    sets = [f"--set={key}={value}" for key, value in {**SLOW_STEPS, "train.steps": "60"}.items()]
    sweep = ["--sweep", "train.seed=1,2,3", "--at-once", "1", "--backend=slurm"]
    done = ndctl("submit", str(SPEC), *sets, *sweep)
    assert done.code == 0, done.out + done.err
    first.wait_for_step(3)
    ids = [one.status()["scheduler"].split()[2] for one in (first, second, third)]
    assert job_fields(slurm, ids[1])["Reason"] == "Dependency"

    # A requeued job has not ended, so the jobs that depend on it keep waiting.
    slurm.output_of("scancel", "--signal=USR1", ids[0])
    first.wait_until("its next run", lambda: len(first.events("LeaderStarted")) == 2)
    assert not second.events("LeaderStarted")
    wait_for(first.has_ended, "the end of the first", 300)
    second.wait_for_step(2)
    assert not third.events("LeaderStarted")

    done = ndctl("cancel", "e2e")
    assert done.code == 0, done.out + done.err
    assert "cancelled: 2 jobs: e2e-seed-2, e2e-seed-3" in done.out
    assert "already ended: 1 job: e2e-seed-1 (SUCCEEDED)" in done.out
    slurm.wait_for("an empty queue", lambda: not slurm.output_of("squeue", "-h"))
    rows = json.loads(ndctl("list", "e2e", "--json").out)["jobs"]
    states = {row["name"]: row["state"] for row in rows}
    assert states["e2e-seed-1"] == "SUCCEEDED"
    assert states["e2e-seed-2"] == states["e2e-seed-3"] == "CANCELLED"
    assert not [line for one in (first, second, third) for line in processes_of(one.run_dir)]
