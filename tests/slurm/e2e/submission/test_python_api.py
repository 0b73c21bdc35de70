"""A notebook on the login node runs, watches and cancels the user's own program on Slurm."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.slurm.e2e.slurm_job import SlurmNdctl

pytestmark = [pytest.mark.slurm, pytest.mark.process, pytest.mark.timeout(300)]

PROGRAM = """
import os, sys, time
import ndctl
for step in range(1, 4):
    ndctl.log(step, loss=1 / step, who=os.environ["SLURMD_NODENAME"])
    print("step", step, flush=True)
    time.sleep(0.3)
time.sleep(float(sys.argv[1]))
"""

NOTEBOOK = """
import json, sys
import ndctl
one = dict(backend="slurm", hosts=2, gpus_per_host=1, run_root=sys.argv[1])
job = ndctl.run(["train.py", 0], name="e2e", **one)
status = job.wait(timeout=200, check=True)
steps = [(m.step, m.loss) for m in job.metrics()]
lines = [str(line) for line in job.logs(rank=1)]
long = ndctl.run(["train.py", 600], name="long", **one)
for line in long.logs(rank=1, follow=True):
    if line.text == "step 3":
        break
ended = long.cancel()
try:
    ndctl.run(["train.py", 0], backend="slurm", hosts=99, gpus_per_host=1, run_root=sys.argv[1])
except ndctl.Error as exc:
    refused = [type(exc).__name__, exc.message, exc.fix]
names = [one.name for one in ndctl.jobs(run_root=sys.argv[1])]
kinds = [event.kind for event in job.events()]
print(json.dumps([status.scheduler, steps, lines, ended.state, refused, names, kinds]))
"""


def test_a_notebook_runs_watches_and_cancels_jobs(ndctl: SlurmNdctl, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, "-c", NOTEBOOK, str(ndctl.run_root)],
        cwd=tmp_path,
        env=ndctl.environ,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr + ndctl.failure_report()
    scheduler, steps, lines, state, refused, names, kinds = json.loads(done.stdout)
    assert scheduler.startswith("Slurm job ")
    assert steps == [[1, 1.0], [2, 0.5], [3, 1 / 3]]
    assert [line.rpartition("] ")[2] for line in lines] == ["step 1", "step 2", "step 3"]
    assert state == "CANCELLED"
    assert refused[0] == "PlanError"
    assert "99" in refused[1]
    assert "cluster.hosts=4" in refused[2], "the cluster has four nodes"
    assert names == ["e2e", "long"]
    assert kinds[0] == "JobSubmitted"
    assert not ndctl.testbed.output_of("squeue", "-h")
