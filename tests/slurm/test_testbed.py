"""The Slurm testbed works as its users expect."""

import fcntl
import tempfile
from pathlib import Path

import pytest

from tests.slurm.testbed import IN_USE, PREFIX, SlurmTestbed, running_testbed, sweep

pytestmark = [pytest.mark.slurm, pytest.mark.process]


def test_a_job_runs_on_its_fake_gpus(slurm: SlurmTestbed) -> None:
    output = slurm.output_of(
        "srun", "-N2", "--gpus-per-node=2", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES"
    )
    assert output.splitlines() == ["0,1", "0,1"]


def test_faults_of_a_test_are_repaired(slurm: SlurmTestbed) -> None:
    slurm.output_of("sbatch", "-N4", "--output=/dev/null", "--wrap", "sleep 600")
    slurm.kill_node("node2")
    slurm.output_of("scontrol", "update", "NodeName=node3", "State=DRAIN", "Reason=a test")
    slurm.output_of(
        *("scontrol", "create", "reservation", "ReservationName=r", "StartTime=now"),
        *("Duration=60", "Nodes=node4", "Users=root", "Flags=IGNORE_JOBS"),
    )
    slurm.stop_ctld("KILL")
    slurm.restore()
    assert slurm.output_of("squeue", "-h") == ""
    assert slurm.output_of("sinfo", "-h", "-o", "%D %T") == "4 idle"


def test_a_node_can_be_cut_off(slurm: SlurmTestbed) -> None:
    if not slurm.has_network:
        pytest.skip("nodes have no networks of their own here")
    slurm.net_down("node4")
    slurm.wait_for("node4 missing", lambda: slurm.node_state("node4").endswith("*"))
    slurm.net_up("node4")
    slurm.wait_for("node4 back", lambda: slurm.node_state("node4") == "idle")


def fails_in_the_middle_of_a_job(there: list[str]) -> None:
    with running_testbed(nodes=2, gpus=0) as testbed:
        testbed.output_of("sbatch", "-N2", "--output=/dev/null", "--wrap", "srun sleep 600")
        testbed.wait_for(
            "a step", lambda: "RUNNING" in testbed.output_of("squeue", "-h", "-o", "%T")
        )
        there += testbed.leftovers()
        raise ZeroDivisionError


@pytest.mark.usefixtures("slurm_available")
def test_nothing_is_left_behind_when_a_test_fails() -> None:
    there: list[str] = []
    with pytest.raises(ZeroDivisionError):
        fails_in_the_middle_of_a_job(there)
    kinds = [line.split()[:2] for line in there]
    paths = {
        "process": Path("/proc"),
        "namespace": Path("/run/netns"),
        "bridge": Path("/sys/class/net"),
    }
    assert sum(kind == "process" for kind, _ in kinds) >= 4
    assert [name for kind, name in kinds if (paths[kind] / name).exists()] == []


@pytest.mark.usefixtures("slurm_available")
def test_a_testbed_in_use_is_not_swept_away_whatever_its_process_id_is_here() -> None:
    """A run in its own process namespace, as in `in_debian.sh`, cannot see other processes."""
    unused_pid = "999999999"
    folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{unused_pid}-", dir="/tmp"))
    with (folder / IN_USE).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        sweep()
        assert folder.exists()
    sweep()
    assert not folder.exists()
