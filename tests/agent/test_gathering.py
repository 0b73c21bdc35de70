"""The last lines of a rank that ended, also where its log lies on storage that does not answer."""

import asyncio
import os
from pathlib import Path

from orchestrator.agent.attempt import Attempt
from orchestrator.agent.gathering import with_last_lines
from orchestrator.contract.datagrams import RankEnded, RankStarted
from orchestrator.contract.protocol import Exited
from orchestrator.system import SystemClock
from tests.agent.world import WAIT_S, LoopClock, a_place, a_start, run_with_clock

GONE = 2_000_000_000


def ended(tmp_path: Path) -> tuple[Attempt, Exited, Path]:
    """A rank of an attempt that has failed, and where its log is."""
    place = a_place(tmp_path)
    attempt = Attempt(a_start(place, "pass"), place, SystemClock())
    attempt.hear(RankStarted(attempt=1, rank=0, local_rank=0, pid=GONE))
    exited = attempt.hear(RankEnded(attempt=1, rank=0, exit_code=3, signal=None))
    assert exited is not None
    attempt.log_dir.mkdir(parents=True)
    return attempt, exited, attempt.log_dir / "rank-0.log"


def test_the_end_of_its_log_is_told_with_the_end_of_a_rank(tmp_path: Path) -> None:
    attempt, exited, log = ended(tmp_path)
    log.write_text("step 1\nbad data\n")
    assert asyncio.run(with_last_lines(attempt, exited)).log_tail == ("step 1", "bad data")


def test_a_log_that_does_not_answer_holds_nobody_up_and_is_named(
    tmp_path: Path,
) -> None:
    """To open a pipe that nobody writes to takes for ever."""
    attempt, exited, log = ended(tmp_path)
    os.mkfifo(log)

    async def look(clock: LoopClock) -> Exited:
        attempt.clock = clock
        telling = asyncio.create_task(with_last_lines(attempt, exited, WAIT_S))
        await asyncio.sleep(0)
        clock.put_forward(WAIT_S)  # the agent does other things meanwhile
        told = await telling
        os.close(os.open(log, os.O_WRONLY))  # the thread that reads may go
        return told

    told = run_with_clock(look)
    assert "did not answer" in told.log_tail[0]
    assert str(log) in told.log_tail[0]
    assert told.age_s >= exited.age_s + WAIT_S, "that it ended is not told as later than it was"
