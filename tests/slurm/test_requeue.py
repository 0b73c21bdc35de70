"""A requeue on a real Slurm. The job only sleeps."""

import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.backends.slurm import job_lookup, render
from orchestrator.backends.slurm.backend import SlurmBackend
from orchestrator.contract.launch import LaunchPlan
from orchestrator.system import SystemClock
from tests.backends.slurm.slurm_launch import a_launch
from tests.slurm.testbed import SlurmTestbed, running_testbed

pytestmark = [pytest.mark.slurm, pytest.mark.process, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def two_nodes(slurm_available: None) -> Iterator[SlurmTestbed]:
    """A cluster with exactly as many nodes as the job needs."""
    with running_testbed(nodes=2, gpus=2) as testbed:
        yield testbed


def submit_sleeping_job(slurm: SlurmTestbed, run_dir: Path) -> tuple[SlurmBackend, LaunchPlan, str]:
    launch = a_launch(run_dir)
    render.folder(launch).mkdir(parents=True)
    script = render.script_path(launch)
    asked = ("-N2", "--gpus-per-node=2", "-o/dev/null", f"--comment='{render.mark(launch)}'")
    lines = "".join(f"#SBATCH {flag}\n" for flag in (*asked, "--requeue"))
    script.write_text(f"#!/bin/sh\n{lines}sleep 600\n")
    job_id = slurm.output_of("sbatch", "--parsable", str(script))
    slurm.wait_for("the job", lambda: job_fields(slurm, job_id)["JobState"] == "RUNNING")
    environ = {
        **slurm.environ,
        "SLURM_JOB_ID": job_id,
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_JOB_PARTITION": job_fields(slurm, job_id)["Partition"],
        "SLURMD_NODENAME": "node1",
    }
    return SlurmBackend(environ, SystemClock(), slurm), launch, job_id


def job_fields(slurm: SlurmTestbed, job_id: str) -> dict[str, str]:
    words = slurm.output_of("scontrol", "show", "job", "-o", job_id).split()
    return dict(word.split("=", 1) for word in words if "=" in word)


def test_a_job_waits_for_a_drained_node_that_it_needs(
    two_nodes: SlurmTestbed, tmp_path: Path
) -> None:
    """If the node were in ExcNodeList, the job would stay BadConstraints after the node resumes."""
    backend, launch, job_id = submit_sleeping_job(two_nodes, tmp_path)
    two_nodes.output_of(
        "scontrol", "update", "NodeName=node2", "State=DRAIN", "Reason=a fan is loud"
    )
    backend.requeue(launch, ("ghost", "node2"))
    two_nodes.wait_for(
        "the queue", lambda: "DRAINED" in job_fields(two_nodes, job_id)["Reason"], 120
    )
    assert job_fields(two_nodes, job_id)["ExcNodeList"] == "(null)"
    two_nodes.output_of("scontrol", "update", "NodeName=node2", "State=RESUME")
    two_nodes.wait_for(
        "its next run", lambda: job_fields(two_nodes, job_id)["JobState"] == "RUNNING", 120
    )
    assert job_fields(two_nodes, job_id)["Restarts"] == "1"
    two_nodes.output_of("scancel", job_id)


def test_a_node_that_was_briefly_down_is_used_again_if_the_job_needs_it(
    two_nodes: SlurmTestbed, tmp_path: Path
) -> None:
    """If the node were in ExcNodeList, the job would stay BadConstraints until a person acts."""
    two_nodes.restore()
    backend, launch, job_id = submit_sleeping_job(two_nodes, tmp_path)
    two_nodes.output_of("scontrol", "update", "NodeName=node2", "State=DOWN", "Reason=a cable")
    two_nodes.output_of("scontrol", "update", "NodeName=node2", "State=RESUME")
    backend.requeue(launch, ("node2",))
    two_nodes.wait_for(
        "its next run", lambda: job_fields(two_nodes, job_id)["JobState"] == "RUNNING", 120
    )
    job = job_fields(two_nodes, job_id)
    assert (job["ExcNodeList"], job["NodeList"]) == ("(null)", "node[1-2]")
    two_nodes.output_of("scancel", job_id)


def test_the_command_in_status_lets_the_job_use_an_excluded_node(
    two_nodes: SlurmTestbed, tmp_path: Path
) -> None:
    """For example a node with strikes. No process of ndctl runs while the job waits, so a person
    has to type the command."""
    two_nodes.restore()
    backend, launch, job_id = submit_sleeping_job(two_nodes, tmp_path)
    job_lookup.record(launch, job_id)
    two_nodes.output_of("scontrol", "requeue", job_id)
    exclude = ("scontrol", "update", f"JobId={job_id}", "ExcNodeList=node2")
    two_nodes.wait_for("the exclude list", lambda: two_nodes(exclude).code == 0, 60)
    two_nodes.wait_for(
        "the pending reason",
        lambda: job_fields(two_nodes, job_id)["Reason"] == "BadConstraints",
        120,
    )
    (seen,) = backend.glance([launch])
    assert "without the excluded nodes (node2) too few nodes match the request" in str(seen.words)
    assert seen.excluded == {"node2": f"scontrol update JobId={job_id} ExcNodeList="}
    two_nodes.output_of(*shlex.split(seen.excluded["node2"]))
    two_nodes.wait_for(
        "its next run", lambda: job_fields(two_nodes, job_id)["JobState"] == "RUNNING", 120
    )
    two_nodes.output_of("scancel", job_id)
