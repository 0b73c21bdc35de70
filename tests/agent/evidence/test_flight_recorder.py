"""Flight recorder dumps, requested from real processes that answer like the trainer's ranks."""

import asyncio
import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from orchestrator.agent.evidence import flight_recorder
from orchestrator.agent.evidence.flight_recorder import (
    MOST_BYTES,
    POLL_S,
    Asking,
    Dumps,
    gather_dumps,
)
from orchestrator.contract.files.env import nccl_pipe
from orchestrator.diagnosis.dumps.dump_summary import from_text
from tests.agent.world import WAIT_S, LoopClock, run_with_clock, until
from tests.e2e.job import ROOT

FLIGHT = ROOT / "tests" / "captured" / "flight"
RANK = """
import itertools, sys, threading, types
from pathlib import Path
from orchestrator.contract.files.env import RankEnv
from trainer.rank.evidence.flight import DumpsOnSignal
rank, folder, how, dump = int(sys.argv[1]), sys.argv[2], sys.argv[3], Path(sys.argv[4])
torch = types.SimpleNamespace(_dump_fr_trace=lambda *what: dump.read_bytes())
if how != "early":
    sys.modules["torch._C._distributed_c10d"] = torch
DumpsOnSignal(RankEnv(rank=rank, trace_dir=folder))
print("ready", flush=True)
if how == "gil":
    sum(itertools.repeat(0))
while how == "loop":
    pass
threading.Event().wait()
"""


@pytest.fixture
def asking(tmp_path: Path) -> Asking:
    return Asking(traces=tmp_path, socket=tmp_path / "ranks.sock", attempt=1, world=4)


class Ranks:
    """Processes that play ranks; `behaviour` says whether and how they answer."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.children: list[subprocess.Popen[bytes]] = []

    def start(self, rank: int, behaviour: str) -> int:
        dump = str(FLIGHT / "trace_0")
        child = subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(self.folder), behaviour, dump],
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        self.children.append(child)
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        return child.pid


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    found = Ranks(tmp_path)
    yield found
    for child in found.children:
        child.kill()
        child.communicate(timeout=WAIT_S)


async def gather_with_clock(pids: dict[int, int], asking: Asking, clock: LoopClock) -> Dumps:
    """Advance the clock only after each rank that can answer has written its dump."""
    gathering = asyncio.create_task(gather_dumps(pids, {}, asking, WAIT_S))
    dumps = [asking.traces / f"flight-{rank}" for rank in (0, 1, 4)]
    await until(lambda: all(dump.exists() for dump in dumps), "the answers")
    ahead_s = 0.0
    while not gathering.done():
        if ahead_s < WAIT_S:
            clock.put_forward(POLL_S)
            ahead_s += POLL_S
        await asyncio.sleep(0)
    return gathering.result()


@pytest.mark.process
def test_ranks_answer_in_any_state_except_while_the_gil_is_held_or_they_are_stopped(
    asking: Asking, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The clock jumps forward by WAIT_S, perhaps while a dump is read.
    monkeypatch.setattr(flight_recorder, "READ_S", 3 * WAIT_S)
    pids = {
        rank: ranks.start(rank, behaviour)
        for rank, behaviour in enumerate(("waits", "loop", "gil", "waits"))
    }
    os.kill(pids[3], signal.SIGSTOP)
    pids[4] = ranks.start(4, "early")
    found = run_with_clock(partial(gather_with_clock, pids, asking))
    assert set(found.reduced) == {0, 1, 4}
    assert from_text(found.reduced[0]).waits
    assert not from_text(found.reduced[4]).seats, "its dump shows that it has called no collective"
    assert found.missing == {
        2: "no answer within 240 s: its GIL is held, or its disk is blocked",
        3: "the process is stopped (state T)",
    }
    assert (asking.traces / "flight-0").read_bytes() == (FLIGHT / "trace_0").read_bytes()


def test_a_dump_that_a_watchdog_wrote_for_an_ended_rank_is_read(asking: Asking) -> None:
    (asking.traces / "flight-0").write_bytes((FLIGHT / "trace_1").read_bytes())
    (asking.traces / "flight-1").write_bytes(b"half of a dump")
    with (asking.traces / "flight-2").open("wb") as file:
        file.truncate(MOST_BYTES + 1)
    ended = dict.fromkeys(range(4), "signal SIGABRT")
    found = asyncio.run(gather_dumps({}, ended, asking, 60.0))
    assert set(found.reduced) == {0}
    assert found.missing[1].startswith("cannot be read: neither JSON nor a pickle")
    assert found.missing[2] == "deleted, because it was larger than 32 MiB"
    assert found.missing[3] == "it had ended (signal SIGABRT) without a dump"
    assert not (asking.traces / "flight-2").exists()


@pytest.fixture
def storage_hangs() -> Iterator[threading.Event]:
    """Storage that blocks until the test is over."""
    released = threading.Event()
    yield released
    assert not released.is_set(), "no reader waited for it"
    released.set()


def test_hanging_storage_blocks_nothing_and_names_no_rank(
    asking: Asking, storage_hangs: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flight_recorder, "_stamp", lambda asking, rank: storage_hangs.wait(WAIT_S))
    found = asyncio.run(gather_dumps({0: os.getpid()}, {1: "exit code 1"}, asking, 0.1))
    timed_out = f"reading {asking.traces} timed out"
    assert (found.reduced, found.missing) == ({}, {0: timed_out, 1: timed_out})
    assert found.withheld == (), "the rank may have answered"


def test_storage_that_starts_to_hang_is_not_taken_for_a_rank_that_does_not_answer(
    asking: Asking, storage_hangs: threading.Event, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flight_recorder, "READ_S", 0.1)
    stamped: list[int] = []

    def stamp(asking: Asking, rank: int) -> None:
        stamped.append(rank)
        if len(stamped) > 1:
            storage_hangs.wait(WAIT_S)

    monkeypatch.setattr(flight_recorder, "_stamp", stamp)
    found = asyncio.run(gather_dumps({0: ranks.start(0, "waits")}, {}, asking, 0.2))
    assert found.missing == {0: f"reading {asking.traces} timed out"}
    assert found.withheld == ()


def test_an_unreadable_dump_does_not_prevent_reading_the_others(
    asking: Asking, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One dump is a pipe without a writer, which would block on open."""
    os.mkfifo(asking.traces / "flight-0")
    with (asking.traces / "flight-1").open("wb") as file:
        file.truncate(MOST_BYTES + 1)
    (asking.traces / "flight-2").write_bytes((FLIGHT / "trace_1").read_bytes())

    def stale(path: Path, missing_ok: bool = False) -> None:
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(Path, "unlink", stale)
    ended = dict.fromkeys(range(3), "signal SIGABRT")
    found = asyncio.run(gather_dumps({}, ended, asking, 60.0))
    assert set(found.reduced) == {2}
    assert found.missing == {
        0: "cannot be read: not a regular file",
        1: "cannot be read: [Errno 116] Stale file handle",
    }


@pytest.mark.process
def test_the_monitor_of_nccl_is_asked_by_its_pipe(asking: Asking, ranks: Ranks) -> None:
    pipe = nccl_pipe(str(asking.socket), 1, 0)
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        asyncio.run(gather_dumps({0: ranks.start(0, "waits")}, {}, asking, WAIT_S))
        assert os.read(reader, 10) == b"1\n"
    finally:
        os.close(reader)


def test_without_ranks_the_answer_comes_at_once(asking: Asking) -> None:
    found = asyncio.run(asyncio.wait_for(gather_dumps({}, {}, asking, 1e6), WAIT_S))
    assert (found.reduced, found.missing) == ({}, {})
