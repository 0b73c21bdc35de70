"""Hostile output of failing ranks blocks neither the leader's event loop nor an agent's."""

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.agent.attempt import Attempt
from orchestrator.agent.evidence.evidence_collector import as_read, with_last_lines
from orchestrator.contract.codec import encode_tagged
from orchestrator.contract.messages.agent_protocol import Stop
from orchestrator.contract.messages.events import RankError, RankExited
from orchestrator.contract.messages.rank_messages import RankStarted
from orchestrator.diagnosis.logs import patterns
from orchestrator.job.state import Run
from orchestrator.job.transitions import step
from orchestrator.journal.journal import read
from orchestrator.system import SystemClock
from tests.agent.world import a_place, a_start
from tests.leader.leader_world import FakeAgent, LedJob, run_script, start_attempt, stopped

MANY = 1_000
MOST_S = 0.050
"""Longest time that the leader's event loop may be busy without a switch to another task."""
HOSTILE = ("mlx5_" * 400, "x" * 8000, "timeout " * 1000, "Assertion " * 800)


def ended(rank: int, host: str) -> RankExited:
    text = HOSTILE[rank % len(HOSTILE)]
    raised = RankError(error="RuntimeError", message=text, step=1, traceback=text)
    reported = RankExited(
        attempt=1,
        rank=rank,
        host=host,
        exit_code=1,
        signal=None,
        step=1,
        error=raised if rank % 2 else None,
    )
    return as_read(reported, tuple(text for _ in range(20)), ())


@pytest.fixture
def matchers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The threads in which log patterns were matched."""
    threads: list[int] = []
    numbers = patterns.Text.numbers

    def record_thread(text: patterns.Text, wanted: tuple[str, ...]) -> Iterator[int]:
        threads.append(threading.get_ident())
        return numbers(text, wanted)

    monkeypatch.setattr(patterns.Text, "numbers", record_thread)
    return threads


def test_many_hostile_exits_do_not_block_the_leaders_loop(
    tmp_path: Path, matchers: list[int]
) -> None:
    exits = [[ended(rank, f"host-{n}") for rank in range(n, MANY, 2)] for n in range(2)]
    messages = [[json.dumps(encode_tagged(one)) for one in each] for each in exits]
    matchers.clear()
    busy: list[float] = []

    async def measure() -> None:
        """CPU time of the thread between two switches, so a loaded machine does not count."""
        while True:
            start = time.thread_time()
            await asyncio.sleep(0)
            busy.append(time.thread_time() - start)

    async def send(agent: FakeAgent, texts: list[str]) -> None:
        for text in texts:
            await agent.ws.send_str(text)
            await asyncio.sleep(0)  # otherwise this sender itself blocks the loop

    async def script(job: LedJob) -> None:
        zero, one = await job.start_both()
        watching = asyncio.create_task(measure())
        await asyncio.gather(send(zero, messages[0]), send(one, messages[1]))
        for agent in (zero, one):
            assert (await agent.expect(Stop)).attempt == 1
        await zero.send(stopped("host-0"))
        await one.send(stopped("host-1"))
        await start_attempt(zero, one, 2)
        watching.cancel()

    run_script(tmp_path, script)
    assert matchers == [], "the leader matched patterns again after the agents"
    assert max(busy) < MOST_S


def test_a_replay_of_the_journal_matches_no_pattern(tmp_path: Path, matchers: list[int]) -> None:
    exits = [ended(rank, f"host-{rank % 2}") for rank in range(8)]

    async def script(job: LedJob) -> Run:
        zero, one = await job.start_both()
        await zero.send(*exits)
        await zero.expect(Stop)
        await one.expect(Stop)
        await zero.send(stopped("host-0"))
        await one.send(stopped("host-1"))
        await start_attempt(zero, one, 2)
        return job.leader.supervisor.run

    run = run_script(tmp_path, script)
    assert len(run.history.incidents) == 1
    matchers.clear()
    folded = Run()
    found = 0
    for entry in read(next(tmp_path.rglob("journal.jsonl"))):
        folded, _ = step(folded, entry.event)
        found += isinstance(entry.event, RankExited) and entry.event.reading is not None
    assert (folded.history.incidents, matchers) == (run.history.incidents, [])
    assert found


def test_an_agent_matches_patterns_outside_its_loop(tmp_path: Path, matchers: list[int]) -> None:
    place = a_place(tmp_path)
    attempt = Attempt(a_start(place, "pass"), place, SystemClock())
    attempt.hear(RankStarted(attempt=1, rank=0, local_rank=0, pid=2_000_000_000))
    exited = attempt.hear(RankExited(attempt=1, rank=0, exit_code=3, signal=None))
    assert exited is not None
    attempt.log_dir.mkdir(parents=True)
    text = "\n".join((*HOSTILE, "torch.OutOfMemoryError: CUDA out of memory. Tried"))
    (attempt.log_dir / "rank-0.log").write_text(text)
    reported = asyncio.run(with_last_lines(attempt, exited))
    assert reported.reading is not None
    assert reported.reading.failure is not None
    assert reported.reading.failure.name == "cuda-out-of-memory"
    assert matchers
    assert threading.get_ident() not in matchers
    assert sum(map(len, reported.log_tail)) < 20 * 1_400
