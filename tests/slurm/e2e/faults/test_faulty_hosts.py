"""Faulty hosts are excluded before the first step, or after they were the culprit twice."""

import json
import os
import signal
from pathlib import Path

import pytest

from tests.slurm.e2e.slurm_job import STEPS, SlurmNdctl, hosts_of, incidents

pytestmark = [pytest.mark.slurm, pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(600)]

SMI = """#!/bin/sh
# Two GPUs; one on node2, where the other has fallen off the bus.
case "$1" in --query-gpu=*) ;; *) exit 1 ;; esac
echo '00000000:17:00.0, NVIDIA H100 80GB HBM3, 0, No'
[ "$SLURMD_NODENAME" = node2 ] || echo '00000000:2A:00.0, NVIDIA H100 80GB HBM3, 0, No'
"""


def test_a_node_that_lacks_a_gpu_is_excluded_before_the_first_step(
    ndctl: SlurmNdctl, finished: SlurmNdctl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smi = tmp_path / "bin" / "nvidia-smi"
    smi.parent.mkdir()
    smi.write_text(SMI)
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{smi.parent}:{os.environ['PATH']}")
    done = ndctl.submit("--follow", cluster__spare_hosts="1", cluster__slurm__nodelist="node[1-3]")
    assert done.code == 0, done.out + done.err

    assert ndctl.losses() == finished.losses()
    assert incidents(ndctl) == [("preflight", "node2", None)]
    (incident,) = ndctl.status()["incidents"]
    assert "2 granted, 1 seen by nvidia-smi, 2 needed" in incident["cause"]
    assert incident["action"] == "node2 is excluded"
    assert sorted(ndctl.allocated()) == ["node1", "node2", "node3"]
    assert sorted(hosts_of(ndctl)) == ["node1", "node3"]
    assert ndctl.status()["attempt"] == 1
    assert ndctl.slurm_job()["Restarts"] == "0"
    ndctl.assert_nothing_left()


def test_a_host_that_was_the_culprit_twice_is_excluded_from_this_job_and_the_next(
    ndctl: SlurmNdctl, finished: SlurmNdctl
) -> None:
    done = ndctl.submit(cluster__spare_hosts="1")
    assert done.code == 0, done.err
    ndctl.wait_for_step(step=2)
    bad = hosts_of(ndctl)[1]
    for attempt, step in ((1, 2), (2, 10)):
        ndctl.wait_for_step(step, attempt)
        assert hosts_of(ndctl)[1] == bad
        os.kill(ndctl.rank_pid(3), signal.SIGBUS)
    ndctl.wait_for_end()
    assert ndctl.losses() == finished.losses()
    assert incidents(ndctl) == [("rank-killed", bad, 3), ("rank-killed", bad, 3)]
    assert bad not in hosts_of(ndctl)
    assert ndctl.slurm_job()["Restarts"] == "0"

    (held,) = json.loads(ndctl("hosts", "--json").out)["hosts"]
    assert (held["cluster"], held["host"], held["excluded"]) == ("tb", bad, True)
    assert [(one["job"], one["attempt"]) for one in held["strikes"]] == [("e2e", 1), ("e2e", 2)]
    assert "excluded until" in ndctl("hosts").out

    assert ndctl.submit("--new", "--follow", train__steps="4").code == 0
    assert ndctl.slurm_job()["ExcNodeList"] == bad
    assert sorted(ndctl.losses()) == list(STEPS[:4])
    ndctl.assert_nothing_left()
