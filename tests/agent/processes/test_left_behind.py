"""Which processes were started by the ranks of a host."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.agent.processes.left_behind import SLURM_JOB, find_left, marks_of
from orchestrator.contract.files import env
from orchestrator.contract.files.run_dir import RunDir

pytestmark = pytest.mark.process


@pytest.mark.parametrize(
    ("more", "found"),
    [
        ({}, True),
        ({"NDCTL_HOST": "host-1"}, False),
        # `sbatch eval.sh` in a rank hands the rank's environment to another Slurm job.
        ({SLURM_JOB: "8"}, False),
        # `ndctl submit` in a rank starts agents without this variable.
        ({env.TORCHRUN_PID: None}, False),
    ],
)
def test_only_programs_of_this_host_and_this_job_are_found(
    tmp_path: Path,
    more: dict[str, str | None],
    found: bool,
) -> None:
    of_rank = {
        SLURM_JOB: "7",
        env.RUN_DIR: str(tmp_path),
        env.HOST: "host-0",
        env.TORCHRUN_PID: "1",
    }
    given = {**os.environ, **of_rank, **more}
    environ = {name: value for name, value in given.items() if value is not None}
    argv = [sys.executable, "-c", "print(flush=True); input()"]
    with subprocess.Popen(
        argv, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    ) as helper:
        assert helper.stdout is not None
        helper.stdout.readline()  # it runs, so its environment can be read
        left = asyncio.run(find_left(marks_of(RunDir(tmp_path), "host-0", None, "7"), held=False))
        helper.communicate(b"\n")
    assert (helper.pid in left) is found
