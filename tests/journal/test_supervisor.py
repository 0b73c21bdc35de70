"""The supervisor: lines are on disk before actions, and a restart has the same state."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.contract.messages.actions import Action, EndJob, StartAttempt, StopAttempt
from orchestrator.contract.messages.events import (
    CancelRequested,
    Event,
    HealthChanged,
    HostStopped,
    StepReached,
    Tick,
)
from orchestrator.job.stage import Diagnosing
from orchestrator.journal.journal import Decided, Entry, Journal, read
from orchestrator.journal.supervisor import Supervisor
from orchestrator.system import SystemClock
from tests.job.job_driver import START, Job, exited


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    with Journal(tmp_path / "journal.jsonl", SystemClock()) as journal:
        yield journal


def feed_all(job: Job, supervisor: Supervisor) -> Supervisor:
    for event, actions in job.all:
        assert supervisor.feed(event) == actions
    assert supervisor.run == job.run
    return supervisor


def test_event_and_actions_are_on_disk_before_they_are_returned(journal: Journal) -> None:
    supervisor = feed_all(Job().running(), Supervisor(journal))
    event = exited(1)
    actions = supervisor.feed(event)
    assert [type(action) for action in actions] == [StopAttempt]
    last = read(journal.path)[-1]
    assert (last.event, last.actions) == (event, actions)


def test_a_tick_without_effect_is_not_journalled(journal: Journal) -> None:
    job = Job().running()
    supervisor = feed_all(job, Supervisor(journal))
    known = len(read(journal.path))
    assert supervisor.feed(Tick(at=START + 1000)) == ()
    assert len(read(journal.path)) == known
    without_effect: list[Event] = [
        HealthChanged(at=START, attempt=1, ranks=((0, 0),), health="slow", age_s=3.0),
        exited(1, attempt=0),
    ]
    for event in without_effect:
        assert supervisor.feed(event) == ()
    assert [entry.event for entry in read(journal.path)[known:]] == without_effect
    assert supervisor.run == job.run


def test_exits_of_stopped_ranks_are_journalled_only_if_they_change_the_state(
    journal: Journal,
) -> None:
    supervisor = feed_all(Job().running(), Supervisor(journal))
    supervisor.feed(CancelRequested(at=START + 60, by="me"))
    known, before = len(read(journal.path)), supervisor.run
    assert supervisor.feed(exited(0, at=START + 61, stopped=True)) == ()
    assert (len(read(journal.path)), supervisor.run) == (known, before)
    by_itself = exited(1, at=START + 61)
    supervisor.feed(by_itself)
    assert read(journal.path)[-1].event == by_itself


def test_a_tick_that_decides_is_journalled(journal: Journal) -> None:
    job = Job()
    job.leads()
    supervisor = feed_all(job, Supervisor(journal))
    (end,) = supervisor.feed(Tick(at=job.at + 600))
    assert isinstance(end, EndJob)
    assert read(journal.path)[-1].actions == (end,)


def test_a_restarted_supervisor_has_the_same_state(journal: Journal, tmp_path: Path) -> None:
    job = Job(spares=1).running()
    job.saves(20)
    job.fails_once()
    job.trains(first=20)
    job.hangs()
    supervisor = feed_all(job, Supervisor(journal))
    copy = tmp_path / "copy.jsonl"
    copy.write_bytes(journal.path.read_bytes())
    with Journal(copy, SystemClock()) as again:
        assert Supervisor(again).run == supervisor.run
    assert isinstance(supervisor.run.stage, Diagnosing)


def test_without_a_journal_line_nothing_is_decided(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    supervisor = feed_all(Job().running(), Supervisor(journal))
    before = supervisor.run

    def full(decided: Decided) -> tuple[Entry, ...]:
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(journal, "extend", full)
        with pytest.raises(OSError, match="no space"):
            supervisor.feed(exited(1))
    assert supervisor.run is before
    (stop,) = supervisor.feed(exited(1))
    assert isinstance(stop, StopAttempt)


EVENTS: list[Event] = [
    *(exited(rank, at=START + 50, stopped=True) for rank in (2, 3)),
    Tick(at=START + 51),
    HostStopped(at=START + 52, attempt=1, host="host-1", finished=False),
    HostStopped(at=START + 53, attempt=1, host="host-0", finished=False),
    StepReached(at=START + 54, attempt=1, step=30, loss=1.0, tokens_per_second=None),
    exited(1, at=START + 55),
]
"""Events while an attempt is being stopped, and late reports."""


def test_events_are_taken_together_up_to_the_first_with_an_action(
    journal: Journal,
) -> None:
    job = Job().running()
    supervisor = feed_all(job, Supervisor(journal))
    supervisor.feed(exited(0))
    known, writes = len(read(journal.path)), []
    extend = journal.extend
    journal.extend = lambda decided: writes.append(len(decided)) or extend(decided)  # type: ignore[method-assign, func-returns-value]
    count, actions = supervisor.take(EVENTS)
    assert [type(action) for action in actions] == [StartAttempt]
    assert EVENTS[count - 1] == EVENTS[4], "the last host has stopped"
    lines = read(journal.path)[known:]
    assert [entry.event for entry in lines] == [*EVENTS[:2], *EVENTS[3:5]], "the tick had no effect"
    assert [entry.actions for entry in lines] == [(), (), (), actions]
    assert writes == [4], "one write"
    assert supervisor.take(EVENTS[count:]) == (2, ())


def test_events_taken_together_are_decided_like_single_ones(
    journal: Journal, tmp_path: Path
) -> None:
    job = Job(spares=1).running()
    job.saves(20)
    job.fails_once()
    job.trains(first=20)
    job.hangs()
    events, together = [event for event, _ in job.all], Supervisor(journal)
    done: list[Action] = []
    while events:
        count, actions = together.take(events)
        done += actions
        del events[:count]
    assert together.run == job.run
    assert done == [action for _, actions in job.all for action in actions]
    with Journal(tmp_path / "one-by-one.jsonl", SystemClock()) as other:
        feed_all(job, Supervisor(other))
        assert other.path.read_bytes() == journal.path.read_bytes()
