"""Recovery within the allocation: after lost ranks, and after a lost node if there is a spare."""

import json
import os
import signal

import pytest

from tests.e2e.job import TP, kill, losses_without_ndctl, wait_for
from tests.slurm.e2e.slurm_job import STEPS, SlurmNdctl, hosts_of, incidents

pytestmark = [pytest.mark.slurm, pytest.mark.process, pytest.mark.timeout(600)]


def test_the_rendered_script_ran_to_its_end(finished: SlurmNdctl) -> None:
    rendered, given, job = finished.read_slurm_records()
    # Slurm returns the script that ndctl rendered.
    assert rendered.strip() == given
    assert (job["JobState"], job["ExitCode"], job["Restarts"]) == ("COMPLETED", "0:0", "0")
    assert finished.state() == "SUCCEEDED"
    assert incidents(finished) == []
    finished.assert_nothing_left()


def test_losses_equal_those_of_the_trainer_alone(
    finished: SlurmNdctl, tmp_path_factory: pytest.TempPathFactory
) -> None:
    assert sorted(finished.losses()) == list(STEPS)
    assert finished.losses() == losses_without_ndctl(tmp_path_factory, **TP)


def test_the_views_show_the_slurm_job(finished: SlurmNdctl) -> None:
    for view in (("status", "e2e"), ("list",), ("describe", "e2e")):
        done = finished(*view)
        assert done.code == 0, done.err
        assert f"Slurm job {finished.job_id}" in done.out


def test_a_spare_replaces_a_node_after_ranks_were_lost(
    ndctl: SlurmNdctl, finished: SlurmNdctl
) -> None:
    """One rank is killed, one is stopped, and then a node fails with all its processes."""
    spare = {"cluster__spare_hosts": "1", "resilience__hang_timeout": "15"}
    done = ndctl.submit(**spare)
    assert done.code == 0, done.err
    ndctl.wait_for_step(step=2)
    first, other = hosts_of(ndctl)
    kill(ndctl.rank_pid(3))
    ndctl.wait_for_step(step=10, attempt=2)
    wait_for(lambda: ndctl.events("CheckpointSaved"), "the files of step 8")
    os.kill(ndctl.rank_pid(0), signal.SIGSTOP)
    ndctl.wait_for_step(step=10, attempt=3)
    ndctl.testbed.kill_node(other)
    ndctl.wait_for_end()

    assert ndctl.losses() == finished.losses()
    assert incidents(ndctl) == [
        ("rank-killed", other, 3),
        ("hang", first, 0),
        ("host-lost", other, None),
    ], ndctl.failure_report()
    killed, stopped, dead = ndctl.status()["incidents"]
    assert killed["evidence"]["signal"] == "SIGKILL"
    assert killed["action"].startswith("restart as attempt 2 from ")
    assert "stopped by a signal" in " ".join([stopped["cause"], *stopped["evidence"]["notes"]])
    assert stopped["action"] == "restart as attempt 3 from checkpoint step-8"
    *_, resumed = ndctl.events("TrainingResumed")
    assert resumed["step"] in (8, 16), "the newest checkpoint when the attempt started"
    # Step 16 is used also if it was complete only after the decision.
    decided = f"restart as attempt 4 from checkpoint step-{resumed['step']}"
    assert dead["action"] in (decided, "restart as attempt 4 from checkpoint step-8")
    assert dead["rule"] == "class-default"
    # The leader did not wait for agent_timeout, because the kernel closed the connections.
    assert "its connection broke" in ndctl.events("AgentLost")[-1]["why"]
    spare_host = next(host for host in ndctl.allocated() if host not in (first, other))
    assert sorted(hosts_of(ndctl)) == sorted([first, spare_host])
    held = json.loads(ndctl("hosts", "--json").out)["hosts"]
    assert {(one["host"], len(one["strikes"]), one["excluded"]) for one in held} == {
        (first, 1, False),
        (other, 2, False),
    }, "a host gets a strike of low weight if a rank was killed from outside"
    assert ndctl.status()["attempt"] == 4
    job = ndctl.slurm_job()
    assert (job["JobState"], job["Restarts"]) == ("COMPLETED", "0")
    assert len(ndctl.events("LeaderStarted")) == 1
    ndctl.assert_nothing_left()
