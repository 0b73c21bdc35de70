"""The scripts that a Slurm site installs, on hosts that are trees of files."""

import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from orchestrator.health import gpus, host_check

pytestmark = pytest.mark.process

SLURM = Path(__file__).parent.parent.parent / "slurm"
SCRIPTS = ("prolog.sh", "epilog.sh", "healthcheck.sh")


@dataclass
class Node:
    """A node below `root` with a fake nvidia-smi and an scontrol that records its calls."""

    root: Path

    def program(self, name: str, text: str) -> None:
        path = self.root / "bin" / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)

    def has_gpus(self, count: int, listed: str, rows: str = "") -> None:
        for bus in range(count):
            (self.root / f"proc/driver/nvidia/gpus/0000:{bus:02x}:00.0").mkdir(parents=True)
        self.program(
            "nvidia-smi",
            f"case $1 in --query-gpu=*) printf '{listed}' ;; *) printf '{rows}' ;; esac",
        )

    def stands(self, state: str) -> None:
        """Set the state that Slurm shows for the node. Other calls are recorded."""
        shown = f"NodeName=node7 Arch=x86_64 State={state} Reason=a cable"
        asked = f'echo "$@" >> {self.root}/asked'
        self.program("scontrol", f'case $1 in show) echo "{shown}" ;; *) {asked} ;; esac')

    def run(self, script: str, **environ: str) -> int:
        done = subprocess.run(
            [str(SLURM / script)],
            env={
                "PATH": f"{self.root}/bin:{os.environ['PATH']}",
                "NDCTL_ROOT": str(self.root),
                "SLURMD_NODENAME": "node7",
                **environ,
            },
            timeout=240,
            check=False,
        )
        return done.returncode

    @property
    def drained(self) -> str:
        """The recorded call of scontrol, if there was one."""
        asked = self.root / "asked"
        return asked.read_text().strip() if asked.exists() else ""


@pytest.fixture
def node(tmp_path: Path) -> Node:
    for folder in ("bin", "dev/shm", "tmp", "etc", "proc", "run"):
        (tmp_path / folder).mkdir(parents=True)
    made = Node(tmp_path)
    (tmp_path / "proc/uptime").write_text("5000.00 9000.00\n")
    made.program("dmesg", "exit 1")
    made.stands("IDLE")
    return made


GOOD = r"00000000:00:00.0, NVIDIA H100, 0, [N/A]\n00000000:01:00.0, NVIDIA H100, 0, [N/A]\n"
ECC = GOOD.replace("H100, 0, [N/A]", "H100, 3, [N/A]", 1)


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_healthy_node_is_not_changed(node: Node, script: str) -> None:
    assert node.run(script) == 0, "one without GPUs"
    node.has_gpus(2, GOOD, r"00000000:00:00.0, 0, 0\n00000000:01:00.0, No, No\n")
    assert node.run(script) == 0
    assert node.drained == ""


@pytest.mark.parametrize(
    ("listed", "rows", "why"),
    [
        (GOOD, r"00000000:01:00.0, 1, 0\n", "rows to remap on GPU 00000000:01:00.0"),
        (GOOD, r"00000000:01:00.0, No, Yes\n", "row remapping failed on GPU 00000000:01:00.0"),
        (ECC, "", "3 uncorrected ECC errors on GPU 00000000:00:00.0"),
        (GOOD.split(r"\n")[0], "", "1 of 2 GPUs"),
    ],
)
def test_a_broken_gpu_drains_the_node(node: Node, listed: str, rows: str, why: str) -> None:
    node.has_gpus(2, listed, rows)
    assert node.run("healthcheck.sh") == 0
    reason = f"Reason=ndctl: health check: {why}"
    assert node.drained == f"update NodeName=node7 State=DRAIN {reason}"


DMESG = """\
[  100.000000] NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus.
[ 4000.000000] NVRM: Xid (PCI:0000:3b:00): 13, pid=7, Graphics Exception
[ 4100.500000] NVRM: Xid (PCI:0000:d8:00): 79, pid=1, GPU has fallen off the bus.
[ 4101.000000] NVRM: Xid (PCI:0000:d8:00): 79, pid=1, GPU has fallen off the bus.
[ 4102.000000] NVRM: Xid (PCI:0000:af:00): 48, pid=1, DBE
"""


def test_a_kernel_message_about_a_gpu_drains_the_node_once(node: Node) -> None:
    """An administrator who resumes the node has fixed the GPU. Users cannot read the kernel log if
    dmesg is restricted."""
    (node.root / "messages").write_text(DMESG)
    node.program("dmesg", f"cat {node.root}/messages")
    assert node.run("healthcheck.sh") == 0
    assert node.drained == "", "no driver of NVIDIA's is loaded"
    node.has_gpus(2, GOOD)
    node.program("scontrol", "exit 1")
    node.run("healthcheck.sh")
    node.stands("IDLE")
    assert node.run("prolog.sh") == 1, "it is still to be told"
    assert node.drained.endswith("prolog: Xid 79 on GPU 0000:d8:00; Xid 48 on GPU 0000:af:00")
    assert node.run("healthcheck.sh") == 0
    assert len(node.drained.splitlines()) == 1
    (node.root / "messages").write_text(f"{DMESG}[ 5003.0] NVRM: Xid (PCI:0000:af:00): 95, x\n")
    (node.root / "proc/uptime").write_text("5010.00 9000.00\n")
    assert node.run("healthcheck.sh") == 0
    assert node.drained.endswith("health check: Xid 95 on GPU 0000:af:00")


def test_only_the_prolog_requeues_the_job(node: Node) -> None:
    node.has_gpus(2, GOOD.split(r"\n")[0])
    assert node.run("prolog.sh") == 1
    assert node.run("epilog.sh", SLURM_JOB_ID="17") == 0
    first, second = node.drained.splitlines()
    assert first.endswith("ndctl: prolog: 1 of 2 GPUs")
    assert second.endswith("ndctl: epilog of job 17: 1 of 2 GPUs")


def test_a_driver_that_hangs_does_not_block_the_check(node: Node) -> None:
    node.has_gpus(1, GOOD)
    node.program("nvidia-smi", "exec sleep 600")
    script = (SLURM / "host_checks.sh").read_text()
    short = script.replace("SMI_TIMEOUT_S=20", "SMI_TIMEOUT_S=1")
    (node.root / "host_checks.sh").write_text(short)
    (node.root / "healthcheck.sh").write_text((SLURM / "healthcheck.sh").read_text())
    (node.root / "healthcheck.sh").chmod(0o755)
    assert node.run(str(node.root / "healthcheck.sh")) == 0
    assert "nvidia-smi failed or hangs (124)" in node.drained


def test_a_site_sets_the_required_number_of_gpus(node: Node) -> None:
    (node.root / "etc/ndctl-host-checks.conf").write_text("NDCTL_GPUS=8\n")
    node.has_gpus(0, GOOD)
    assert node.run("healthcheck.sh") == 0
    assert node.drained.endswith("2 of 8 GPUs")


def test_a_full_or_missing_folder_drains_the_node(node: Node) -> None:
    full = "Filesystem 1M Used Available Use% Mounted"
    node.program("df", f'echo "{full}"; echo "x 100 97 3 97% $2"')
    assert node.run("healthcheck.sh") == 0
    shm, tmp = f"{node.root}/dev/shm", f"{node.root}/tmp"
    assert node.drained.endswith(
        f"{shm} has 3 MiB left, 64 needed; {tmp} has 3 MiB left, 64 needed"
    )
    (node.root / "bin/df").unlink()
    assert node.run("healthcheck.sh", NDCTL_SCRATCH=f"{node.root}/gone") == 0
    assert node.drained.endswith(f"df failed or timed out for {node.root}/gone")


@pytest.mark.parametrize(
    ("state", "kept"),
    [
        ("IDLE+DRAIN", True),
        ("ALLOCATED+DRAIN", True),
        ("MIXED*+DRAIN+NOT_RESPONDING", True),
        ("ALLOCATED", False),
        ("DOWN", False),
        ("IDLE+UNDRAIN", False),
    ],
)
def test_a_node_that_is_drained_keeps_its_reason(node: Node, state: str, kept: bool) -> None:
    """For example the reason of an administrator who looks for a bad cable."""
    node.has_gpus(2, GOOD.split(r"\n")[0] + r"\n")
    node.stands(state)
    assert node.run("healthcheck.sh") == 0
    assert (node.drained == "") is kept
    assert node.run("prolog.sh") == 1, "a job has no business there either way"


def test_an_scontrol_that_fails_changes_no_exit_code(node: Node) -> None:
    node.has_gpus(2, GOOD.split(r"\n")[0])
    node.program("scontrol", "exit 1")
    assert node.run("healthcheck.sh") == 0
    assert node.run("prolog.sh") == 1


def test_the_epilog_removes_leftovers_of_a_user_without_jobs(node: Node) -> None:
    shm = node.root / "dev/shm"
    for name in ("nccl-abc", "torch_1", "mine"):
        (shm / name).write_text("")
    uid = str(os.getuid())
    assert node.run("epilog.sh", SLURM_JOB_UID=uid) == 0
    assert len(list(shm.iterdir())) == 3, "this test runs as that user"
    node.program("pgrep", "exit 1")
    assert node.run("epilog.sh", SLURM_JOB_UID=uid) == 0
    assert [path.name for path in shm.iterdir()] == ["mine"]


def test_scripts_and_agents_have_the_same_limits() -> None:
    text = (SLURM / "host_checks.sh").read_text()
    said = dict(re.findall(r"^([A-Z_]+)=(\S+)$", text, re.MULTILINE))
    assert float(said["SMI_TIMEOUT_S"]) == gpus.SMI_TIMEOUT_S
    assert int(said["SHM_LEAST_MIB"]) << 20 == host_check.SHM_LEAST
    assert int(said["SCRATCH_LEAST_MIB"]) << 20 == host_check.SCRATCH_BYTES
    assert float(said["XID_AGE_S"]) == gpus.XID_AGE_S
    assert {int(number) for number in said["FATAL_XIDS"].split(",")} == {*gpus.FATAL_XIDS}
    assert said["QUERY"] == gpus.QUERY
    assert said["REMAP_QUERY"] == gpus.REMAP_QUERY
