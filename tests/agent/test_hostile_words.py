"""Whatever ranks wrote as they ended, neither the leader's loop nor an agent's waits for it."""

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
from tests.leader.leader_world import FakeAgent, Led, go, play, stopped

MANY = 1_000
MOST_S = 0.050
"""That the leader's loop may be busy without a look at anything else."""
HOSTILE = ("mlx5_" * 400, "x" * 8000, "timeout " * 1000, "Assertion " * 800)


def ended(rank: int, host: str) -> RankExited:
    words = HOSTILE[rank % len(HOSTILE)]
    raised = RankError(error="RuntimeError", message=words, step=1, traceback=words)
    told = RankExited(
        attempt=1,
        rank=rank,
        host=host,
        exit_code=1,
        signal=None,
        step=1,
        error=raised if rank % 2 else None,
    )
    return as_read(told, tuple(words for _ in range(20)), ())


@pytest.fixture
def looking(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The threads in which patterns were looked for."""
    threads: list[int] = []
    numbers = patterns.Text.numbers

    def noted(text: patterns.Text, wanted: tuple[str, ...]) -> Iterator[int]:
        threads.append(threading.get_ident())
        return numbers(text, wanted)

    monkeypatch.setattr(patterns.Text, "numbers", noted)
    return threads


def test_a_burst_of_hostile_ends_keeps_the_leaders_loop_from_nothing(
    tmp_path: Path, looking: list[int]
) -> None:
    exits = [[ended(rank, f"host-{n}") for rank in range(n, MANY, 2)] for n in range(2)]
    said = [[json.dumps(encode_tagged(one)) for one in each] for each in exits]
    looking.clear()
    busy: list[float] = []

    async def watch() -> None:
        """Processor time of the loop's thread between two looks: a loaded machine costs none."""
        while True:
            begun = time.thread_time()
            await asyncio.sleep(0)
            busy.append(time.thread_time() - begun)

    async def send(agent: FakeAgent, texts: list[str]) -> None:
        for text in texts:
            await agent.ws.send_str(text)
            await asyncio.sleep(0)  # else it is the agent that keeps the loop

    async def script(job: Led) -> None:
        zero, one = await job.started()
        watching = asyncio.create_task(watch())
        await asyncio.gather(send(zero, said[0]), send(one, said[1]))
        for agent in (zero, one):
            assert (await agent.hear(Stop)).attempt == 1
        await zero.say(stopped("host-0"))
        await one.say(stopped("host-1"))
        await go(zero, one, 2)
        watching.cancel()

    play(tmp_path, script)
    assert looking == [], "what agents have read is looked at again"
    assert max(busy) < MOST_S


def test_a_fold_of_the_journal_looks_for_no_pattern(tmp_path: Path, looking: list[int]) -> None:
    exits = [ended(rank, f"host-{rank % 2}") for rank in range(8)]

    async def script(job: Led) -> Run:
        zero, one = await job.started()
        await zero.say(*exits)
        await zero.hear(Stop)
        await one.hear(Stop)
        await zero.say(stopped("host-0"))
        await one.say(stopped("host-1"))
        await go(zero, one, 2)
        return job.leader.supervisor.run

    run = play(tmp_path, script)
    assert len(run.history.incidents) == 1
    looking.clear()
    folded = Run()
    found = 0
    for entry in read(next(tmp_path.rglob("journal.jsonl"))):
        folded, _ = step(folded, entry.event)
        found += isinstance(entry.event, RankExited) and entry.event.reading is not None
    assert (folded.history.incidents, looking) == (run.history.incidents, [])
    assert found


def test_an_agent_reads_an_end_beside_its_loop(tmp_path: Path, looking: list[int]) -> None:
    place = a_place(tmp_path)
    attempt = Attempt(a_start(place, "pass"), place, SystemClock())
    attempt.hear(RankStarted(attempt=1, rank=0, local_rank=0, pid=2_000_000_000))
    exited = attempt.hear(RankExited(attempt=1, rank=0, exit_code=3, signal=None))
    assert exited is not None
    attempt.log_dir.mkdir(parents=True)
    words = "\n".join((*HOSTILE, "torch.OutOfMemoryError: CUDA out of memory. Tried"))
    (attempt.log_dir / "rank-0.log").write_text(words)
    told = asyncio.run(with_last_lines(attempt, exited))
    assert told.reading is not None
    assert told.reading.failure is not None
    assert told.reading.failure.name == "cuda-out-of-memory"
    assert looking
    assert threading.get_ident() not in looking
    assert sum(map(len, told.log_tail)) < 20 * 1_400
