"""Many events at once: few writes, and each action done before what comes after it is decided."""

import asyncio
import threading
from pathlib import Path
from typing import Any

from orchestrator.contract.messages.actions import Action, GatherEvidence, JudgeHang, StopAttempt
from orchestrator.contract.messages.events import Event, HangDetected, JournalDelayed
from orchestrator.job.stage import Diagnosing, Stage
from orchestrator.journal.journal import MOST_LINES, Decided, Entry, Journal, read
from orchestrator.journal.supervisor import Supervisor
from orchestrator.leader.event_queue import EventQueue
from orchestrator.simulation.clock import Timeline
from orchestrator.simulation.processes.loop import VirtualLoop
from orchestrator.system import SystemClock
from tests.agent.world import WAIT_S
from tests.job.job_driver import START, Job, exited

HANG = HangDetected(
    at=START + 99, attempt=1, phase="train", step=3, stalled_s=9.0, limit_s=8.0, behind=()
)


class Watched(Journal):
    """Remembers how many lines each write had; a write takes until it may go on."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, SystemClock())
        self.writes: list[int] = []
        self.writing, self.goes_on = threading.Event(), threading.Event()

    def extend(self, decided: Decided) -> tuple[Entry, ...]:
        self.writes.append(len(decided))
        self.writing.set()
        assert self.goes_on.wait(WAIT_S)
        return super().extend(decided)


def late(number: int) -> Event:
    """News of an attempt that is over decides nothing."""
    return exited(0, attempt=0, at=START + number)


def deciding(journal: Watched, done: list[tuple[type[Action], type[Stage]]]) -> EventQueue:
    """Of a job that trains; notes what is performed, and what the state is meanwhile."""
    journal.goes_on.set()
    supervisor = Supervisor(journal)
    for event, _ in Job().running().all:
        supervisor.feed(event)
    journal.writes.clear()

    async def perform(action: Action) -> None:
        done.append((type(action), type(supervisor.run.stage)))

    return EventQueue(supervisor, perform)


def test_what_comes_while_the_disk_writes_is_the_next_write(tmp_path: Path) -> None:
    done: list[tuple[type[Action], type[Stage]]] = []

    async def storm(journal: Watched) -> list[Event]:
        one = deciding(journal, done)
        known = len(read(journal.path))
        journal.goes_on.clear()
        journal.writing.clear()
        events = [*(late(n) for n in range(MOST_LINES)), HANG]
        one.happened(events[0])
        first = asyncio.create_task(one.decide())
        await asyncio.to_thread(journal.writing.wait, WAIT_S)
        for event in events[1:]:
            one.happened(event)
        journal.goes_on.set()
        await first
        await one.decide()
        told = [entry.event for entry in read(journal.path)[known:]]
        assert told == events
        return told

    with Watched(tmp_path / "journal.jsonl") as journal:
        asyncio.run(storm(journal))
        assert journal.writes == [1, MOST_LINES]
    assert done == [(GatherEvidence, Diagnosing)]


def test_no_write_has_more_lines_than_the_next_leader_expects(tmp_path: Path) -> None:
    async def storm(journal: Watched) -> None:
        one = deciding(journal, [])
        for number in range(2 * MOST_LINES + 1):
            one.happened(late(number))
        for _ in range(3):
            await one.decide()

    with Watched(tmp_path / "journal.jsonl") as journal:
        asyncio.run(storm(journal))
        assert journal.writes == [MOST_LINES, MOST_LINES, 1]


def test_what_comes_behind_an_action_is_decided_when_it_was_done(tmp_path: Path) -> None:
    done: list[tuple[type[Action], type[Stage]]] = []

    async def both(journal: Watched) -> None:
        one = deciding(journal, done)
        for event in (late(1), HANG, late(2), exited(1, at=START + 100)):
            one.happened(event)
        await one.decide()
        assert journal.writes == [2]
        assert done == [(GatherEvidence, Diagnosing)]
        await one.decide()
        assert journal.writes == [2, 2]

    with Watched(tmp_path / "journal.jsonl") as journal:
        asyncio.run(both(journal))
    assert [kind for kind, _ in done] == [GatherEvidence, StopAttempt, JudgeHang]


def test_a_write_that_took_long_is_reported_once(tmp_path: Path) -> None:
    """On a virtual loop: the storage of the journal fails for 12 s."""
    timeline = Timeline()
    full_until = 12.0

    async def worker(function: Any, *arguments: Any) -> Any:
        if timeline.now < full_until:
            raise OSError(28, "No space left on device")
        return function(*arguments)

    async def perform(action: Action) -> None:
        await asyncio.sleep(0)

    with Journal(tmp_path / "journal.jsonl", SystemClock()) as journal:
        supervisor = Supervisor(journal)
        for event, _ in Job().running().all:
            supervisor.feed(event)
        queue = EventQueue(supervisor, perform, worker)  # type: ignore[arg-type]
        queue.happened(HANG)

        async def decides() -> None:
            while queue.waiting:
                await queue.decide()

        VirtualLoop(timeline).create_task(decides())
        while timeline.run_next():
            pass
        *_, cause, notice = [entry.event for entry in read(journal.path)]
    assert cause == HANG
    assert notice == JournalDelayed(
        at=HANG.at + 12.0, waited_s=12.0, why="[Errno 28] No space left on device"
    )
