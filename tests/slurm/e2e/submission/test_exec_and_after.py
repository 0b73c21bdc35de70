"""`ndctl exec` and `ndctl submit --after` on real Slurm daemons."""

from pathlib import Path

import pytest

from tests.e2e.job import SPEC
from tests.slurm.e2e.two_node_job import SLOW_STEPS, Job
from tests.slurm.testbed import SlurmTestbed

pytestmark = [pytest.mark.slurm, pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(900)]


def test_a_command_runs_beside_the_ranks_and_the_next_job_depends_on_this_one(
    slurm: SlurmTestbed, tmp_path: Path
) -> None:
    ndctl = Job(tmp_path / "runs", slurm)
    sets = [f"--set={key}={value}" for key, value in {**SLOW_STEPS, "train.steps": "40"}.items()]
    done = ndctl("submit", str(SPEC), *sets, "--backend=slurm")
    assert done.code == 0, done.out + done.err
    ndctl.wait_for_step(3)

    host = ndctl.events("LeaderStarted")[0]["host"]
    words = ("sh", "-c", "echo $NDCTL_HOST $SLURM_JOB_ID; exit 7")
    done = ndctl("exec", "e2e", "--host", host, "--", *words)
    assert (done.code, done.out.split()) == (7, [host, ndctl.id]), done.err

    for name, after in (("second", "e2e"), ("third", "second")):
        done = ndctl(
            "submit", str(SPEC), *sets, "--backend=slurm", f"--set=name={name}", "--after", after
        )
        assert done.code == 0, done.out + done.err
    waiting = slurm.output_of("squeue", "-h", "-t", "PENDING", "-o", "%j %r")
    assert waiting.count("Dependency") == 2, waiting

    # Without the first, none of them may train. For Slurm a cancelled job is COMPLETED.
    assert ndctl("cancel", "e2e").code == 0
    slurm.wait_for("an empty queue", lambda: not slurm.output_of("squeue", "-h"))
    rows = {row.split()[0]: row for row in ndctl("list", "--all").out.splitlines()}
    for name in ("e2e", "second", "third"):
        assert "CANCELLED" in rows[name] or "FAILED" in rows[name], rows[name]
    assert not (ndctl.run_root / "second" / "metrics.jsonl").exists()
