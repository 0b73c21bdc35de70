"""What a real Slurm makes of a requeue; the job only sleeps."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.backends.slurm import render
from orchestrator.backends.slurm.backend import SlurmBackend
from orchestrator.contract.launch import LaunchPlan
from orchestrator.system import SystemClock
from tests.backends.slurm.slurm_launch import a_launch
from tests.slurm.testbed import SlurmTestbed, running_testbed

pytestmark = [pytest.mark.slurm, pytest.mark.process, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def pair(slurm_there: None) -> Iterator[SlurmTestbed]:
    """A partition of just as many nodes as the job wants."""
    with running_testbed(nodes=2, gpus=2) as testbed:
        yield testbed


def asleep(slurm: SlurmTestbed, run_dir: Path) -> tuple[SlurmBackend, LaunchPlan, str]:
    launch = a_launch(run_dir)
    render.folder(launch).mkdir(parents=True)
    script = render.script_path(launch)
    asked = ("-N2", "--gpus-per-node=2", "-o/dev/null", f"--comment='{render.mark(launch)}'")
    lines = "".join(f"#SBATCH {flag}\n" for flag in (*asked, "--requeue"))
    script.write_text(f"#!/bin/sh\n{lines}sleep 600\n")
    job_id = slurm.told("sbatch", "--parsable", str(script))
    slurm.wait_for("the job", lambda: shown(slurm, job_id)["JobState"] == "RUNNING")
    environ = {
        **slurm.environ,
        "SLURM_JOB_ID": job_id,
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_JOB_PARTITION": shown(slurm, job_id)["Partition"],
        "SLURMD_NODENAME": "node1",
    }
    return SlurmBackend(environ, SystemClock(), slurm), launch, job_id


def shown(slurm: SlurmTestbed, job_id: str) -> dict[str, str]:
    words = slurm.told("scontrol", "show", "job", "-o", job_id).split()
    return dict(word.split("=", 1) for word in words if "=" in word)


def test_a_drained_node_that_the_job_cannot_do_without_is_waited_for(
    pair: SlurmTestbed, tmp_path: Path
) -> None:
    """In ExcNodeList it would make the job BadConstraints for good, though it is resumed."""
    backend, launch, job_id = asleep(pair, tmp_path)
    pair.told("scontrol", "update", "NodeName=node2", "State=DRAIN", "Reason=a fan is loud")
    backend.requeue(launch, ("ghost", "node2"))
    pair.wait_for("the queue", lambda: "DRAINED" in shown(pair, job_id)["Reason"], 120)
    assert shown(pair, job_id)["ExcNodeList"] == "(null)"
    pair.told("scontrol", "update", "NodeName=node2", "State=RESUME")
    pair.wait_for("its next run", lambda: shown(pair, job_id)["JobState"] == "RUNNING", 120)
    assert shown(pair, job_id)["Restarts"] == "1"
    pair.told("scancel", job_id)
