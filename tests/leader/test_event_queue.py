"""Many events become few writes, and an action is done before later events are decided."""

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


class SlowJournal(Journal):
    """Records the number of lines of each write; a write waits until `may_finish` is set."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, SystemClock())
        self.writes: list[int] = []
        self.writing, self.may_finish = threading.Event(), threading.Event()

    def extend(self, decided: Decided) -> tuple[Entry, ...]:
        self.writes.append(len(decided))
        self.writing.set()
        assert self.may_finish.wait(WAIT_S)
        return super().extend(decided)


def late_event(number: int) -> Event:
    """An event of an old attempt, which causes no action."""
    return exited(0, attempt=0, at=START + number)


def event_queue(journal: SlowJournal, done: list[tuple[type[Action], type[Stage]]]) -> EventQueue:
    """The queue of a job that trains. `done` records each performed action and the stage then."""
    journal.may_finish.set()
    supervisor = Supervisor(journal)
    for event, _ in Job().running().all:
        supervisor.feed(event)
    journal.writes.clear()

    async def perform(action: Action) -> None:
        done.append((type(action), type(supervisor.run.stage)))

    return EventQueue(supervisor, perform)


def test_events_that_arrive_during_a_write_are_the_next_write(tmp_path: Path) -> None:
    done: list[tuple[type[Action], type[Stage]]] = []

    async def send_events(journal: SlowJournal) -> list[Event]:
        queue = event_queue(journal, done)
        known = len(read(journal.path))
        journal.may_finish.clear()
        journal.writing.clear()
        events = [*(late_event(n) for n in range(MOST_LINES)), HANG]
        queue.happened(events[0])
        first = asyncio.create_task(queue.decide())
        await asyncio.to_thread(journal.writing.wait, WAIT_S)
        for event in events[1:]:
            queue.happened(event)
        journal.may_finish.set()
        await first
        await queue.decide()
        journalled = [entry.event for entry in read(journal.path)[known:]]
        assert journalled == events
        return journalled

    with SlowJournal(tmp_path / "journal.jsonl") as journal:
        asyncio.run(send_events(journal))
        assert journal.writes == [1, MOST_LINES]
    assert done == [(GatherEvidence, Diagnosing)]


def test_no_write_has_more_lines_than_most_lines(tmp_path: Path) -> None:
    async def send_events(journal: SlowJournal) -> None:
        queue = event_queue(journal, [])
        for number in range(2 * MOST_LINES + 1):
            queue.happened(late_event(number))
        for _ in range(3):
            await queue.decide()

    with SlowJournal(tmp_path / "journal.jsonl") as journal:
        asyncio.run(send_events(journal))
        assert journal.writes == [MOST_LINES, MOST_LINES, 1]


def test_events_after_an_action_are_decided_when_the_action_is_done(tmp_path: Path) -> None:
    done: list[tuple[type[Action], type[Stage]]] = []

    async def send_events(journal: SlowJournal) -> None:
        queue = event_queue(journal, done)
        for event in (late_event(1), HANG, late_event(2), exited(1, at=START + 100)):
            queue.happened(event)
        await queue.decide()
        assert journal.writes == [2]
        assert done == [(GatherEvidence, Diagnosing)]
        await queue.decide()
        assert journal.writes == [2, 2]

    with SlowJournal(tmp_path / "journal.jsonl") as journal:
        asyncio.run(send_events(journal))
    assert [kind for kind, _ in done] == [GatherEvidence, StopAttempt, JudgeHang]


def test_a_write_that_took_long_is_reported_once(tmp_path: Path) -> None:
    """On a virtual event loop, the storage of the journal fails for 12 s."""
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
