"""Programs that behave badly, as real jobs. Most import no torch, so that a job takes seconds."""

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.job import Ndctl, assert_nothing_left, processes_of, wait_for

pytestmark = pytest.mark.process

RETURNS_FIRST = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
for step in range(4):
    if step == 3 and dist.get_rank() == 1:
        break
    dist.all_reduce(torch.ones(1))
"""

ENDS_ALONE = """
import os, time
time.sleep(0 if os.environ["RANK"] == "1" else 2)
print("done", flush=True)
"""

FORKS_AWAY = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(600)
    os._exit(0)
print("parent ends", flush=True)
"""

SWALLOWS = """
import signal, time
signal.signal(signal.SIGTERM, lambda *_: print("no", flush=True))
print("ready", flush=True)
while True:
    time.sleep(0.1)
"""

KILLED = """
import os, time
if os.environ["RANK"] == "1" and not os.path.exists("once"):
    open("once", "w").close()
    time.sleep(1)
    os.kill(os.getpid(), 9)
"""

PRINTS = """
import sys, time
line = "x" * 99_999 + "\\n"
size = 0
while size < 200_000_000:
    size += sys.stdout.write(line)
    time.sleep(0.001)
print("all of", size)
"""
"""At most 100 MB/s, for 2 s or longer."""


@pytest.fixture
def ndctl(tmp_path: Path) -> Ndctl:
    return Ndctl(tmp_path / "runs")


def words(folder: Path, source: str, *more: str) -> tuple[str, ...]:
    (folder / "bad.py").write_text(source)
    where = ("--set", f"run.workdir={folder}", "--gpus-per-host", "2")
    return ("run", "--name", "e2e", *where, *more, "--", "bad.py")


def log_of(ndctl: Ndctl, rank: int) -> str:
    return (ndctl.run_dir / "logs" / "attempt-1" / "host-0" / f"rank-{rank}.log").read_text()


def incident_of(ndctl: Ndctl) -> Any:
    (incident,) = ndctl.status()["incidents"]
    return incident


def test_a_rank_that_returns_at_once_is_named_when_another_one_needs_it(
    ndctl: Ndctl, tmp_path: Path
) -> None:
    limit = ("--set", "resilience.max_restarts=0")
    done = ndctl(*words(tmp_path, RETURNS_FIRST, "--follow", *limit))
    assert done.code == 1, done.out + done.err
    found = incident_of(ndctl)
    assert (found["kind"], found["culprit"]["rank"]) == ("ended-first", 1)
    assert (
        found["cause"]
        == "rank 1 ended with exit code 0 before any step was reported, before the others"
    )
    assert "all ranks need the same number of steps" in found["advice"]
    assert_nothing_left(ndctl.run_dir)


def test_ranks_may_end_at_different_times(ndctl: Ndctl, tmp_path: Path) -> None:
    done = ndctl(*words(tmp_path, ENDS_ALONE, "--follow"))
    assert done.code == 0, done.out + done.err
    assert [log_of(ndctl, rank) for rank in (0, 1)] == ["done\n", "done\n"]


def test_processes_that_a_program_leaves_behind_end_with_the_job(
    ndctl: Ndctl, tmp_path: Path
) -> None:
    """Their GPU memory would be missing to the next job."""
    done = ndctl(*words(tmp_path, FORKS_AWAY, "--follow"))
    assert done.code == 0, done.out + done.err
    assert "SUCCEEDED" in done.out
    assert_nothing_left(ndctl.run_dir)


def test_a_program_that_swallows_sigterm_is_killed_after_the_grace(
    ndctl: Ndctl, tmp_path: Path
) -> None:
    done = ndctl(*words(tmp_path, SWALLOWS, "--set", "resilience.stop_grace=1"))
    assert done.code == 0, done.out + done.err
    logs = [ndctl.run_dir / "logs" / "attempt-1" / "host-0" / f"rank-{n}.log" for n in (0, 1)]
    wait_for(lambda: all(log.exists() and log.read_text() for log in logs), "the handlers")
    done = ndctl("cancel", "e2e")
    assert done.code == 0, done.out + done.err
    assert "its ranks get SIGTERM and 1 s to exit" in done.out
    wait_for(lambda: not processes_of(ndctl.run_dir), "the end")
    status = ndctl.status()
    assert status["state"] == "CANCELLED"
    killed = "ranks 0-1 did not end within 1 s of SIGTERM (resilience.stop_grace)"
    assert killed in status["reason"]
    assert log_of(ndctl, 0) == "ready\nno\n"


def test_output_of_100_mb_per_second_is_complete_and_delays_no_supervision(
    ndctl: Ndctl, tmp_path: Path
) -> None:
    done = ndctl(*words(tmp_path, KILLED + PRINTS, "--follow"))
    assert done.code == 0, done.out + done.err
    found = incident_of(ndctl)
    assert (found["kind"], found["culprit"]["rank"]) == ("rank-killed", 1)
    assert found["detected_after_s"] < 2.0
    log = ndctl.run_dir / "logs" / "attempt-2" / "host-0" / "rank-0.log"
    assert log.stat().st_size == 200_000_017
    assert log.read_bytes().endswith(b"x\nall of 200000000\n")
