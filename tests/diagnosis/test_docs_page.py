"""The steps of docs/diagnose.md for plain torchrun, with real ranks on gloo."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from orchestrator.cli import cli

PAGE = Path(__file__).parents[2] / "docs" / "diagnose.md"
RANKS = 3
LATE = 1
LIMIT_S = 240.0
TRAIN = f"""
import time

import dump_on_signal
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
x = torch.ones(8)
for step in range(1000):
    if step == 5:
        open(f"at-step-5-{{dist.get_rank()}}", "w").close()
    if step == 5 and dist.get_rank() == {LATE}:
        time.sleep(3600)
    dist.all_reduce(x)
"""


@pytest.fixture
def torchrun(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    module = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert module
    (tmp_path / "dump_on_signal.py").write_text(module[1])
    (tmp_path / "train.py").write_text(TRAIN)
    argv = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    environ = {**os.environ, "TORCH_FR_BUFFER_SIZE": "2000", "OMP_NUM_THREADS": "1"}
    with (tmp_path / "out.txt").open("wb") as out:
        run = subprocess.Popen(
            [*argv, f"--nproc-per-node={RANKS}", "train.py"],
            cwd=tmp_path,
            env=environ,
            stdout=out,
            stderr=out,
        )
        try:
            yield run
        finally:
            for pid in children(run.pid):
                os.kill(pid, 9)
            run.kill()
            run.wait(LIMIT_S)


def children(pid: int) -> list[int]:
    """Child processes of `pid`, as `pgrep -P` finds them."""
    found = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True, check=False)
    return [int(line) for line in found.stdout.split()]


def wait_for(folder: Path, *names: str) -> None:
    until = time.monotonic() + LIMIT_S
    while any(not (folder / name).exists() or not (folder / name).stat().st_size for name in names):
        assert time.monotonic() < until, list(folder.iterdir())
        time.sleep(0.2)


@pytest.mark.process
@pytest.mark.timeout(2 * LIMIT_S)
def test_the_documented_steps_find_the_culprit_under_plain_torchrun(
    tmp_path: Path, torchrun: subprocess.Popen[bytes]
) -> None:
    until = time.monotonic() + LIMIT_S
    while len(list(tmp_path.glob("at-step-5-*"))) < RANKS:
        assert time.monotonic() < until, (tmp_path / "out.txt").read_text()
        time.sleep(0.2)
    time.sleep(0.5)
    for pid in children(torchrun.pid):
        os.kill(pid, 10)
    dumps = tmp_path / "dumps"
    wait_for(dumps, *(f"fr_trace_rank_{rank}" for rank in range(RANKS)))
    wait_for(dumps, *(f"rank-{rank}.stacks" for rank in range(RANKS)))
    time.sleep(0.5)
    assert torchrun.poll() is None
    said = CliRunner().invoke(cli, ["diagnose", str(dumps)]).output
    cause = f"rank {LATE} did not call the operation in which the others wait"
    assert f"{cause}: operation 6 of default_pg" in said
    assert re.search(rf"stacks +rank {LATE} is in <module> \(.*train.py", said)
    assert re.search(r"stacks +ranks 0, 2 are in all_reduce .*, called by <module> \(", said)
    assert "unreadable" not in said
