"""Unusual sites: a job survives what Slurm or a node lacks there."""

import os
import subprocess
import tempfile
from pathlib import Path

import pytest

from orchestrator.contract.files import exit_codes
from tests.e2e.job import kill
from tests.slurm.e2e.two_node_job import (
    NAME,
    STEPS,
    TESTBED_KNOBS,
    Job,
    fill_disk,
    job_on,
    uninterrupted,
)
from tests.slurm.testbed import SlurmTestbed, running_testbed

pytestmark = [pytest.mark.slurm, pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(900)]

TRAINING = 3
SAVES = {"checkpoint.every_steps": "4"}


def assert_same_losses_and_no_incident(job: Job, **options: str) -> None:
    job.wait_for_end()
    assert job.losses() == uninterrupted(**options)
    job.assert_succeeded_without_incident()


# Without accounting


def commands_without(folder: Path, *missing: str) -> str:
    """A PATH without these commands."""
    folder.mkdir()
    places = [Path(place) for place in os.environ["PATH"].split(":")]
    for place in filter(Path.is_dir, [*places, Path("/usr/sbin"), Path("/sbin")]):
        for command in place.iterdir():
            link = folder / command.name
            if command.name not in missing and not link.is_symlink():
                link.symlink_to(command)
    return str(folder)


def test_a_job_needs_neither_sacct_nor_slurmdbd(cluster: SlurmTestbed, tmp_path: Path) -> None:
    cluster.restore()
    path = commands_without(tmp_path / "bin", "sacct", "sacctmgr", "sreport", "sstat")
    with job_on(cluster, tmp_path / "runs") as there:
        job = there.with_environ(PATH=path)
        doctor = job("doctor", "--backend", "slurm")
        assert doctor.code == exit_codes.OK, doctor.out + doctor.err
        assert "sacct" in doctor.out, "doctor reports that there is no accounting"
        job.submit_successfully()
        job.wait_for_step(TRAINING)
        job.slurm.output_of("scontrol", "requeue", job.id)
        assert_same_losses_and_no_incident(job)
        job.assert_resumed_without_lost_step(attempt=2)
        for verb in (("list",), ("describe", NAME), ("events", NAME)):
            done = job(*verb)
            assert done.code == exit_codes.OK, done.err
        assert job.status()["scheduler"] == f"Slurm job {job.id}"


# GPUs of several kinds in one partition


def test_in_a_mixed_partition_a_job_gets_nodes_of_one_kind(
    slurm_available: None, tmp_path: Path
) -> None:
    knobs = {**TESTBED_KNOBS, "TB_OTHER_GPUS": "3:a100:4"}
    with (
        running_testbed(nodes=4, gpus=1, knobs=knobs) as testbed,
        job_on(testbed, tmp_path / "runs") as job,
    ):
        kinds = testbed.output_of("sinfo", "-h", "-N", "-p", "train", "-o", "%N %G")
        assert kinds.splitlines()[1:3] == ["node2 gpu:fake:1", "node3 gpu:a100:4"]

        unknown = job.submit(**{"cluster.slurm.gpu_type": "a100"})
        assert unknown.code != exit_codes.OK
        assert "Slurm reports gpu:a100" in unknown.err
        assert "set cluster.gpu to one of" in unknown.err
        more = job.submit(**{"cluster.hosts": "4"})
        assert "only 2 can be used" in more.err, more.err
        assert not job.run_dir.exists()

        job.submit_successfully()
        assert_same_losses_and_no_incident(job)
        assert job.events("LeaderStarted")[0]["allocation"]["hosts"] == ["node1", "node2"]


# A node on which only the shared file system is writable


def make_temporary_folders_read_only(testbed: SlurmTestbed, node: str, keep: list[Path]) -> None:
    """Makes /tmp and /var/tmp of a node read-only, except the folders of the cluster itself."""
    pid = (testbed.folder / "run" / f"slurmd-{node}.pid").read_text().strip()
    aside = Path(tempfile.mkdtemp(prefix="ndctl-aside-", dir="/mnt"))
    lines = ["set -e"]
    for number, path in enumerate(keep):
        lines += [f"mkdir {aside}/{number}", f"mount --bind {path} {aside}/{number}"]
    lines.append("mount -t tmpfs none /tmp")
    for number, path in enumerate(keep):
        lines += [f"mkdir -p {path}", f"mount --bind {aside}/{number} {path}"]
    lines += ["mount -o remount,ro /tmp", "mount -t tmpfs -o ro none /var/tmp"]
    inside = ["nsenter", "-t", pid, "-m", "bash", "-c", "\n".join(lines)]
    done = subprocess.run(inside, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"a node's file systems cannot be changed here: {done.stderr.strip()}")


def test_a_job_runs_on_a_node_without_temporary_folders(
    slurm_available: None, tmp_path: Path
) -> None:
    with (
        running_testbed(nodes=2, gpus=1, knobs=TESTBED_KNOBS) as testbed,
        job_on(testbed, tmp_path / "runs") as job,
    ):
        make_temporary_folders_read_only(testbed, "node2", [testbed.folder, tmp_path])
        tried = testbed(["srun", "-w", "node2", "sh", "-c", "touch /tmp/x || touch /var/tmp/x"])
        assert tried.code != 0
        job.submit_successfully(**SAVES)
        assert_same_losses_and_no_incident(job, **SAVES)


# A shared file system that is full for a while


def test_a_job_survives_a_full_shared_file_system(slurm_available: None, small_disk: Path) -> None:
    """Training continues without checkpoints; the job waits until it can write the last one."""
    with (
        running_testbed(nodes=2, gpus=1, knobs=TESTBED_KNOBS) as testbed,
        job_on(testbed, small_disk / "runs") as job,
    ):
        job.submit_successfully(**SAVES)
        job.wait_until("a checkpoint", lambda: job.events("CheckpointSaved"))
        filler = fill_disk(small_disk)
        output = job.wait_until(
            "a message about the full disk", lambda: "No space left" in status_and_agent_logs(job)
        )
        assert output
        filler.unlink()
        job.wait_for_end()
        assert job.losses() == uninterrupted(**SAVES)
        status = job.status()
        assert (status["state"], status["checkpoint"]["step"]) == ("SUCCEEDED", STEPS)
        assert all(one["culprit"]["host"] is None for one in status["incidents"]), status
        assert job.slurm_job()["Restarts"] == "0"


def status_and_agent_logs(job: Job) -> str:
    """The job's status and the logs of its agents; the error is in one of them."""
    return job("status", NAME).out + job("logs", NAME, "--agents").out


# Clocks

SKEW_S = 300.0
SITECUSTOMIZE = """\
import os, time
if os.environ.get("SLURMD_NODENAME") == {node!r}:
    now, now_ns = time.time, time.time_ns
    time.time = lambda: now() + {skew_s}
    time.time_ns = lambda: now_ns() + int({skew_s} * 1e9)
"""
"""Shifts the clock of Python programs on one node: all nodes share the kernel's clock."""


@pytest.mark.parametrize(("node", "skew_s"), [("node1", -SKEW_S), ("node2", SKEW_S)])
def test_a_node_whose_clock_is_wrong_is_named_and_costs_nothing(
    cluster: SlurmTestbed, tmp_path: Path, node: str, skew_s: float
) -> None:
    (tmp_path / "sitecustomize.py").write_text(SITECUSTOMIZE.format(node=node, skew_s=skew_s))
    cluster.restore()
    with job_on(cluster, tmp_path / "runs") as job:
        job.submit_successfully(**SAVES, **{"cluster.slurm.env": f"{{PYTHONPATH: {tmp_path}}}"})
        job.wait_until("a checkpoint", lambda: job.events("CheckpointSaved"))
        assert f"node2 is {SKEW_S:.0f}" in job.events_text()
        kill(job.rank_pid(1))
        job.wait_for_end()
        assert job.losses() == uninterrupted(**SAVES)
        status = job.status()
        (incident,) = status["incidents"]
        assert (status["state"], incident["kind"]) == ("SUCCEEDED", "rank-killed")
        assert (incident["culprit"]["host"], incident["culprit"]["rank"]) == ("node2", 1)
        assert job.slurm_job()["Restarts"] == "0"
