"""Evidence of a rank: last log lines, process state, kernel function, stacks, open files."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable
from pathlib import Path

import pytest

from orchestrator.agent.evidence import rank_evidence
from orchestrator.agent.evidence.rank_evidence import (
    LOG_LINES,
    STACK_LINES,
    gather_stacks,
    has_open,
    last_lines,
    place_in_kernel,
    process_state,
    send_signal,
)
from tests.agent.world import WAIT_S, wait_for
from tests.e2e.job import ROOT

ANSWERING_RANK = """
import sys, time
from orchestrator.contract.files.env import RankEnv
from trainer.rank.evidence.stacks import StacksOnSignal
StacksOnSignal(RankEnv(rank=int(sys.argv[2]), trace_dir=sys.argv[1]))
print("ready", flush=True)
def waits_here():
    time.sleep(600)
waits_here()
"""


def test_the_last_lines_of_a_log_are_its_end(tmp_path: Path) -> None:
    log = tmp_path / "rank.log"
    log.write_text("".join(f"line {i}\n" for i in range(10_000)))
    assert last_lines(log) == tuple(f"line {i}" for i in range(10_000 - LOG_LINES, 10_000))
    assert last_lines(log, 1) == ("line 9999",)


def test_a_missing_log_has_no_lines(tmp_path: Path) -> None:
    assert last_lines(tmp_path / "none.log") == ()
    assert last_lines(tmp_path) == ()


def test_a_log_with_invalid_text_is_shown(tmp_path: Path) -> None:
    log = tmp_path / "rank.log"
    log.write_bytes(b"\xff\xfe\x00 end")
    assert last_lines(log) == ("\ufffd\ufffd\x00 end",)
    log.write_bytes(b"x" * 1_000_000)
    (line,) = last_lines(log)
    assert len(line) < 10_000


def test_a_signal_to_a_process_that_has_ended_is_no_error() -> None:
    done = subprocess.Popen(["true"])
    done.wait(WAIT_S)
    send_signal(done.pid, signal.SIGTERM)


@pytest.mark.process
def test_the_state_of_a_process_is_the_letter_of_linux() -> None:
    child = subprocess.Popen(["sleep", "600"])
    try:
        wait_for(lambda: process_state(child.pid) == "S", "S")
        os.kill(child.pid, signal.SIGSTOP)
        wait_for(lambda: process_state(child.pid) == "T", "T")
        child.kill()
        wait_for(lambda: process_state(child.pid) == "Z", "Z")
    finally:
        child.kill()
        child.wait(WAIT_S)
    assert process_state(child.pid) == "gone"
    assert process_state(os.getpid()) == "R"


WAITS_IN_KERNEL = "import ctypes, time; ctypes.CDLL(None).vfork(); time.sleep(600)"
"""The parent waits in the kernel for its child, which sleeps."""


@pytest.mark.process
def test_the_kernel_function_in_which_a_process_waits_is_found() -> None:
    child = subprocess.Popen([sys.executable, "-c", WAITS_IN_KERNEL], start_new_session=True)
    try:
        wait_for(lambda: process_state(child.pid) == "D", "D")
        assert "clone" in place_in_kernel(child.pid) or "vfork" in place_in_kernel(child.pid)
    finally:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait(WAIT_S)
    assert place_in_kernel(child.pid) == ""


@pytest.mark.process
def test_a_process_that_has_a_file_open_is_found(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    with lock.open("w") as file:
        child = subprocess.Popen(["sleep", "600"], stdout=file)
        try:
            wait_for(lambda: has_open(child.pid, str(lock)), "the child")
        finally:
            child.kill()
            child.wait(WAIT_S)


REOPENS_FILES = """
import os, sys
def some():
    return [os.open(os.devnull, os.O_RDONLY) for _ in range(200)]
others = some()
lock = open(sys.argv[1])  # the last file that is checked
while True:
    for fd in others:
        os.close(fd)
    others = some()
"""


@pytest.mark.process
def test_a_process_that_closes_other_files_meanwhile_is_found(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    lock.touch()
    child = subprocess.Popen([sys.executable, "-c", REOPENS_FILES, str(lock)])
    try:
        wait_for(lambda: has_open(child.pid, str(lock)), "the child")
        assert all(has_open(child.pid, str(lock)) for _ in range(20))
    finally:
        child.kill()
        child.wait(WAIT_S)


@pytest.mark.process
def test_stacks_come_from_ranks_that_can_answer_without_waiting_for_others(
    tmp_path: Path,
) -> None:
    before = "an older stack\n"
    (tmp_path / "rank-0.stacks").write_text(before)
    children = [
        subprocess.Popen(
            [sys.executable, "-c", ANSWERING_RANK, str(tmp_path), str(rank)],
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        for rank in range(2)
    ]
    try:
        for child in children:
            assert child.stdout is not None
            assert child.stdout.readline() == b"ready\n"
        os.kill(children[1].pid, signal.SIGSTOP)
        # The kernel stops it a moment later, and one that still seems to run is waited for.
        wait_for(lambda: process_state(children[1].pid) == "T", "the stop")
        gone = subprocess.Popen(["true"])
        gone.wait(WAIT_S)
        pids = [(0, children[0].pid), (1, children[1].pid), (2, gone.pid)]
        stacks = asyncio.run(asyncio.wait_for(gather_stacks(pids, tmp_path, 1e6), WAIT_S))
    finally:
        for child in children:
            child.kill()
            child.communicate(timeout=WAIT_S)
    assert set(stacks) == {0}
    assert any("waits_here" in line for line in stacks[0])
    assert "an older stack" not in stacks[0]
    assert len(stacks[0]) <= STACK_LINES


def test_unreadable_stacks_are_missing_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One file is missing, and one is a pipe without a writer, which blocks like a hanging disk."""
    monkeypatch.setattr(rank_evidence, "READ_S", 1.0)
    calls: list[Path] = []

    def sizes(traces: Path, ranks: Iterable[int]) -> dict[int, int]:
        calls.append(traces)
        return dict.fromkeys(ranks, min(len(calls), 2))

    monkeypatch.setattr(rank_evidence, "_sizes", sizes)
    os.mkfifo(tmp_path / "rank-1.stacks")
    (tmp_path / "rank-2.stacks").write_text("x here it is")
    missing: dict[int, str] = {}
    gone = [(rank, 2_000_000_000 + rank) for rank in range(3)]
    stacks = asyncio.run(gather_stacks(gone, tmp_path, 0.5, missing))
    assert stacks == {2: (" here it is",)}
    assert missing[0].startswith("cannot be read: [Errno 2]")
    assert missing[1] == f"reading {tmp_path} timed out"


def test_hanging_storage_does_not_block_the_collection_of_stacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    released = threading.Event()
    monkeypatch.setattr(rank_evidence, "_sizes", lambda traces, ranks: released.wait(WAIT_S))
    missing: dict[int, str] = {}
    assert asyncio.run(gather_stacks([(0, 2_000_000_000)], tmp_path, 0.1, missing)) == {}
    assert missing == {0: f"reading {tmp_path} timed out"}
    assert not released.is_set()
    released.set()


def test_without_ranks_the_answer_comes_at_once(tmp_path: Path) -> None:
    assert asyncio.run(asyncio.wait_for(gather_stacks([], tmp_path, 1e6), WAIT_S)) == {}
