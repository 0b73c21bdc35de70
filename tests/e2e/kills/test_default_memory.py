"""Checkpoints in memory by default: they are used where the host has the memory, and no kind of
refusal ends or changes a job."""

import resource
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import pytest

from orchestrator.contract.memory.slot_file import BEGIN
from tests.e2e.job import ROOT, WAIT_S, Ndctl, assert_nothing_left, submit_args, wait_for

pytestmark = [pytest.mark.process, pytest.mark.xdist_group("e2e"), pytest.mark.timeout(1200)]

DEFAULT: Mapping[str, str] = {"checkpoint__memory__every": "auto"}
SMALL_FILE = 1 << 20
"""A slot has more bytes, and no other file of this job has."""


def kept(ndctl: Ndctl) -> list[dict[str, Any]]:
    return ndctl.events("MemoryCheckpointsSet")


def test_two_hosts_at_once_cost_no_checkpoint_of_the_disk(ndctl: Ndctl, reference: Ndctl) -> None:
    """Each of them keeps copies of the other. The first host leads."""
    faults = ("kill:host=1@step=21", "kill:host=2@step=21")
    drills = [word for fault in faults for word in ("--drill", fault)]
    four = {"cluster__hosts": "4", "cluster__gpus_per_host": "1"}
    rare = {"checkpoint__every_steps": "1000"}
    done = ndctl.submit("--follow", *drills, **four, **rare, **DEFAULT)
    assert done.code == 0, done.out + done.err
    start, *again = ndctl.events("TrainingResumed")
    assert start["step"] == 0
    # Steps take milliseconds here, so copies on other hosts may be complete many steps later.
    assert all(one["in_memory"] and 0 < one["step"] <= 20 for one in again), again
    assert {one["copies"] for one in kept(ndctl)} == {2}
    assert all(one["host_bytes"] > 0 for one in kept(ndctl))
    assert "of each host's memory" not in ndctl("describe", "e2e").out, "it ended with the agents"
    assert ndctl.losses() == reference.losses()
    assert_nothing_left(ndctl.run_dir)


# In every run tests/trainer/checkpoint/memory/test_disk_from_slot.py has the refusals that follow.
@pytest.mark.slow
def test_a_job_whose_host_refuses_the_memory_trains_without(ndctl: Ndctl) -> None:
    """No process of the job may have a file, also one in memory, of the size of a slot."""
    little = {**DEFAULT, "data__files": "'{stdlib}/json/*.py'"}
    words = submit_args("--follow", "--drill", "kill:rank=3@step=20", **little)
    done = subprocess.run(
        ["prlimit", f"--fsize={SMALL_FILE}", sys.executable, "-m", "orchestrator", *words],
        env=ndctl.environ,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(ndctl.losses()) == 24
    assert [one["copies"] for one in kept(ndctl)] == [None, None]
    assert "the kernel refuses" in kept(ndctl)[0]["why"]
    # The file of step 16 may not be complete on a busy machine.
    start, resumed = (event["step"] for event in ndctl.events("TrainingResumed"))
    assert start == 0
    assert resumed in (8, 16)
    assert "none: the kernel refuses" in ndctl("describe", "e2e").out


@pytest.mark.slow
def test_ranks_give_up_together_when_one_of_them_can_keep_no_more(ndctl: Ndctl) -> None:
    """From some step on, the kernel refuses rank 3 writes to files, so it completes no slot."""
    done = ndctl.submit(train__steps="100000", checkpoint__every_steps="100000", **DEFAULT)
    assert done.code == 0, done.out + done.err
    wait_for(lambda: ndctl.num_steps() > 8, "some steps")
    pid = ndctl.rank_pid(3)
    free = resource.prlimit(pid, resource.RLIMIT_FSIZE, (BEGIN.size, resource.RLIM_INFINITY))
    wait_for(lambda: len(kept(ndctl)) == 2, "the end of checkpoints in memory")
    resource.prlimit(pid, resource.RLIMIT_FSIZE, free)
    first, second = kept(ndctl)
    assert (first["copies"], second["copies"]) == (1, None)
    assert "rank 3 on host-1" in second["why"]
    steps = ndctl.num_steps()
    wait_for(lambda: ndctl.num_steps() > steps + 20, "more steps")
    assert not ndctl.events("RankExited")
    assert ndctl("cancel", "e2e").code == 0
    assert_nothing_left(ndctl.run_dir)
    assert ndctl.losses()[steps + 20] > 0
