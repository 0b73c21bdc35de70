"""A node lacks the Python interpreter: Slurm's error names it, and the job does not wait for it."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.e2e.slurm_job import SlurmNdctl, hosts_of, incidents
from tests.slurm.testbed import SlurmTestbed

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.process,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(os.geteuid() != 0, reason="mounts something on one node"),
]
BAD = "node2"
SOON_S = 60.0
"""Limit on a busy machine. If ndctl did not read Slurm's error, it would wait `init_timeout`, ten
minutes."""


@contextlib.contextmanager
def without_interpreter(testbed: SlurmTestbed, node: str) -> Iterator[None]:
    """For example because the node has not mounted the file system of the virtual environment."""
    pid = (testbed.folder / "run" / f"slurmd-{node}.pid").read_text().strip()
    there = ["nsenter", "-m", "-t", pid]
    place = str(Path(sys.executable).parent)
    subprocess.run([*there, "mount", "-t", "tmpfs", "none", place], check=True, timeout=30)
    try:
        yield
    finally:
        subprocess.run([*there, "umount", place], check=True, timeout=30)


def assert_named_at_once(ndctl: SlurmNdctl) -> None:
    assert incidents(ndctl) == [("preflight", BAD, None)]
    (incident,) = ndctl.status()["incidents"]
    assert incident["cause"].startswith(f"no agent can start on {BAD}: slurmstepd")
    assert incident["cause"].endswith(f"execve(): {sys.executable}: No such file or directory")
    assert incident["action"] == f"{BAD} is excluded"
    (given_up,) = ndctl.events("HostUnavailable")
    assert given_up["host"] == BAD
    assert given_up["at"] - ndctl.events("LeaderStarted")[0]["at"] < SOON_S
    assert BAD not in hosts_of(ndctl)
    assert ndctl.status()["attempt"] == 1, "it cost no attempt"
    ndctl.assert_nothing_left()


def test_a_spare_takes_the_place_of_a_node_without_an_interpreter(
    ndctl: SlurmNdctl, finished: SlurmNdctl
) -> None:
    with without_interpreter(ndctl.testbed, BAD):
        done = ndctl.submit(
            "--follow", cluster__spare_hosts="1", cluster__slurm__nodelist="node[1-3]"
        )
    assert done.code == 0, done.out + done.err
    assert ndctl.losses() == finished.losses()
    assert_named_at_once(ndctl)
    assert ndctl.slurm_job()["Restarts"] == "0"


def test_without_a_spare_the_job_is_requeued_without_that_node_alone(
    ndctl: SlurmNdctl, finished: SlurmNdctl
) -> None:
    with without_interpreter(ndctl.testbed, BAD):
        done = ndctl.submit("--follow", cluster__slurm__exclude="node4")
    assert done.code == 0, done.out + done.err
    assert ndctl.losses() == finished.losses()
    first, second = ndctl.events("LeaderStarted")
    assert first["allocation"]["hosts"] == ["node1", "node2"], "else this tests nothing"
    assert second["allocation"]["hosts"] == ["node1", "node3"]
    (requeue,) = [action for action in ndctl.actions() if action["kind"] == "Requeue"]
    assert requeue["exclude"] == [BAD]
    assert_named_at_once(ndctl)
    assert ndctl.slurm_job()["Restarts"] == "1"
