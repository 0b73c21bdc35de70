"""Excluded hosts are shown in the plan, at submit, and while the job waits for other nodes."""

import shlex
import time
from pathlib import Path

import pytest

from orchestrator import host_strikes
from tests.e2e.job import SPEC
from tests.slurm.e2e.slurm_job import SlurmNdctl
from tests.slurm.testbed import SlurmTestbed

pytestmark = [pytest.mark.slurm, pytest.mark.process, pytest.mark.timeout(300)]


def strike_twice(run_root: Path, host: str) -> None:
    for attempt in (1, 2):
        lost = host_strikes.Strike(
            at=time.time(), host=host, job="other", attempt=attempt, kind="host-lost", cause="mute"
        )
        host_strikes.record(host_strikes.path_of(run_root, "tb"), lost)


def occupy(slurm: SlurmTestbed, *nodes: str) -> str:
    where = ("-w", ",".join(nodes), f"-N{len(nodes)}", "--exclusive", "-o/dev/null")
    job = slurm.output_of("sbatch", "--parsable", *where, "--wrap=sleep 600")
    slurm.wait_for("it to run", lambda: slurm.output_of("squeue", "-h", "-t", "R", "-j", job))
    return job


def assert_gets(ndctl: SlurmNdctl, nodes: str) -> None:
    """Waits until Slurm starts the job. Other tests train to the end, so this job is cancelled."""
    ndctl.testbed.wait_for("the job", lambda: ndctl.slurm_job()["JobState"] == "RUNNING")
    assert ndctl.slurm_job()["NodeList"] == nodes
    assert ndctl("cancel", "e2e").code == 0


def test_a_node_with_strikes_is_shown_everywhere_with_the_command_that_clears_it(
    ndctl: SlurmNdctl,
) -> None:
    slurm = ndctl.testbed
    strike_twice(ndctl.run_root, "node4")
    other = occupy(slurm, "node1", "node2")

    plan = ndctl("plan", str(SPEC), "--backend", "slurm")
    assert plan.code == 0, plan.err
    output = " ".join(plan.out.split())
    assert "hosts not used: node4 is excluded (until 20" in output
    assert "2 strikes, last host-lost in other: mute)" in output
    assert "- to use node4: ndctl hosts clear node4" in output

    done = ndctl.submit()
    assert done.code == 0, done.err
    assert "node4 is excluded (until 20" in done.err
    assert done.err.strip().endswith("to use it: ndctl hosts clear node4")

    slurm.wait_for("the queue", lambda: ndctl.slurm_job()["Reason"] == "Resources")
    assert ndctl.slurm_job()["ExcNodeList"] == "node4"
    assert "  excluded    node4 is excluded (until 20" in ndctl("status", "e2e").out
    why = ndctl.status()["excluded"]["node4"]
    typed = why.partition("; to use it: ")[2]
    assert typed == f"ndctl hosts clear node4 && scontrol update JobId={ndctl.job_id} ExcNodeList="
    for words in typed.split(" && "):
        command = shlex.split(words)
        if command[0] == "ndctl":
            assert ndctl(*command[1:]).code == 0
        else:
            slurm.output_of(*command)
    assert_gets(ndctl, "node[3-4]")
    slurm.output_of("scancel", other)


def test_a_job_waits_for_one_switch_no_longer_than_the_spec_says(ndctl: SlurmNdctl) -> None:
    slurm = ndctl.testbed
    others = [occupy(slurm, node) for node in ("node1", "node3")]
    asked = {"cluster__slurm__switches": "1", "cluster__slurm__switch_wait": "0:20"}
    done = ndctl.submit(**asked)
    assert done.code == 0, done.err
    shown = slurm.output_of("scontrol", "show", "job", "-o", ndctl.job_id)
    assert "Switches=1@00:00:20" in shown
    assert_gets(ndctl, "node[2,4]")
    slurm.output_of("scancel", *others)


def test_a_node_that_does_not_fit_is_not_selected_and_an_absent_one_is_unknown(
    ndctl: SlurmNdctl,
) -> None:
    shown = ndctl("plan", str(SPEC), "--backend=slurm", "--set=cluster.slurm.constraint=ib")
    assert (
        "each of node1, node2, node3, node4 is not selected (without the feature ib)" in shown.err
    )
    assert "drained" not in shown.err
    shown = ndctl("plan", str(SPEC), "--backend=slurm", "--set=cluster.slurm.nodelist=node9")
    assert "cluster.slurm.nodelist: unknown node node9" in shown.err
