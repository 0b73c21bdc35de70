"""The stacks that a rank writes when it is asked. A busy process goes on unharmed."""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from orchestrator.agent.evidence.rank_evidence import gather_stacks, send_signal
from orchestrator.contract.files.env import STACKS_IN_C, STACKS_SIGNAL
from tests.agent.world import WAIT_S
from tests.e2e.job import ROOT

pytestmark = pytest.mark.process

RANK = """
import itertools, signal, sys, threading
from orchestrator.contract.files.env import RankEnv
from trainer.rank.evidence.stacks import StacksOnSignal
folder, how = sys.argv[1:]
stacks = StacksOnSignal(RankEnv(rank=3, trace_dir=folder))

def deep(calls):
    return calls and deep(calls - 1)

def busy():
    for calls in itertools.cycle(range(400)):
        deep(calls)
        one = threading.Thread(target=deep, args=(30,))
        one.start()
        one.join()

def waits_here():
    threading.Event().wait()

if how == "busy":
    for _ in range(3):
        threading.Thread(target=busy, daemon=True).start()
if how == "next attempt":
    stacks.begin(RankEnv(rank=1, trace_dir=folder + "/next"))
if how == "unblocked":
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
print("ready", flush=True)
if how == "C code":
    sum(itertools.repeat(0))
waits_here()
"""
REQUESTS = 200
"""A signal handler of faulthandler crashed this process at the second to the sixth of them."""


@contextmanager
def rank(folder: Path, how: str) -> Iterator[subprocess.Popen[bytes]]:
    child = subprocess.Popen(
        [sys.executable, "-c", RANK, str(folder), how],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        yield child
    finally:
        child.kill()
        child.communicate(timeout=WAIT_S)


def test_a_rank_with_busy_threads_answers_and_goes_on(tmp_path: Path) -> None:
    with rank(tmp_path, "busy") as child:
        for _ in range(REQUESTS):
            os.kill(child.pid, STACKS_SIGNAL)
            time.sleep(0.002)  # a second signal while one is pending would be lost
        stacks = asyncio.run(gather_stacks([(3, child.pid)], tmp_path, WAIT_S))
        assert child.poll() is None
    last = "\n".join(stacks[3])
    assert "in waits_here" in last
    assert "in busy" in last
    assert "stacks_of_others" not in last


def test_the_stacks_of_the_next_attempt_are_in_its_own_file(tmp_path: Path) -> None:
    with rank(tmp_path, "next attempt") as child:
        asked = gather_stacks([(1, child.pid)], tmp_path / "next", WAIT_S)
        assert any("in waits_here" in line for line in asyncio.run(asked)[1])
    assert (tmp_path / "rank-3.stacks").read_text() == ""


def test_a_program_that_unblocks_all_signals_goes_on(tmp_path: Path) -> None:
    with rank(tmp_path, "unblocked") as child:
        asyncio.run(gather_stacks([(3, child.pid)], tmp_path, 0.5))
        assert child.poll() is None


def test_a_rank_whose_gil_is_held_answers_when_it_is_urged(tmp_path: Path) -> None:
    with rank(tmp_path, "C code") as child:
        assert asyncio.run(gather_stacks([(3, child.pid)], tmp_path, 0.5)) == {}
        stacks = asyncio.run(
            gather_stacks(
                [(3, child.pid)],
                tmp_path,
                2.0,
                urge=lambda ranks: send_signal(child.pid, STACKS_IN_C),
            )
        )
        assert any('"<string>", line' in line for line in stacks[3]), stacks
        assert child.poll() is None
