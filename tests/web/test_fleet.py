"""Jobs whose storage hangs delay no other job."""

import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from orchestrator.contract.files.run_dir import RunDir
from orchestrator.dashboard.reading.job_reader import JobReader, ReadJob
from orchestrator.errors import JobError
from orchestrator.posix.crew import MOST_HANGING, SIZE
from orchestrator.web import fleet as fleet_module
from orchestrator.web.fleet import Place
from tests.dashboard.dashboard_story import StoryClock, started
from tests.web.served_jobs import PATIENT_S, fleet_of, renamed, written


class Storage:
    """Reading the jobs in `hangs` takes until `back` is set."""

    def __init__(self, hangs: Sequence[RunDir]) -> None:
        self.hangs = {one.path for one in hangs}
        self.back = threading.Event()
        self.look = JobReader.look

    def __call__(self, reader: JobReader, now: float) -> ReadJob | None:
        if reader.run_dir.path in self.hangs:
            self.back.wait(PATIENT_S)
        return self.look(reader, now)


@pytest.fixture
def jobs(tmp_path: Path) -> list[RunDir]:
    return [written(tmp_path / str(n) / f"j{n}", renamed(started(), f"j{n}")) for n in range(30)]


@pytest.fixture
def storage(jobs: list[RunDir], monkeypatch: pytest.MonkeyPatch) -> Iterator[Storage]:
    """Twelve jobs hang: more than there are threads."""
    one = Storage(jobs[:12])
    monkeypatch.setattr(JobReader, "look", lambda reader, now: one(reader, now))
    monkeypatch.setattr(fleet_module, "LATE_S", 0.5)
    yield one
    one.back.set()


def test_storage_that_hangs_hides_no_other_job(jobs: list[RunDir], storage: Storage) -> None:
    fleet = fleet_of(jobs)
    fleet.crew.slow_s = 0.05
    # On a busy machine a job that does not hang takes longer than this as well.
    while set((state := fleet.look()).unreadable) != storage.hangs:
        pass
    assert [job.path for job in state.jobs] == [one.path for one in jobs[12:]]
    time.sleep(0.5)
    assert "its file system has not responded for" in fleet.look().unreadable[jobs[0].path]
    storage.back.set()
    while len(state.jobs) < len(jobs):
        state = fleet.look()
    assert state.unreadable == {}


def test_a_job_is_shown_as_it_was_until_its_storage_is_late(
    jobs: list[RunDir], storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs, storage.hangs = storage.hangs, set()
    fleet = fleet_of(jobs)
    assert len(fleet.look().jobs) == len(jobs)
    fleet.crew.slow_s = 0.05
    storage.hangs = hangs
    monkeypatch.setattr(fleet_module, "LATE_S", PATIENT_S)
    state = fleet.look()
    assert (len(state.jobs), state.unreadable) == (len(jobs), {})


def test_a_file_system_that_is_lost_takes_few_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = [written(tmp_path / "lost" / f"j{n}", started()) for n in range(40)]
    good = [written(tmp_path / "good" / f"j{n}", started()) for n in range(5)]
    storage, before = Storage([]), threading.active_count()
    monkeypatch.setattr(JobReader, "look", lambda reader, now: storage(reader, now))
    monkeypatch.setattr(fleet_module, "LATE_S", 5.0)
    fleet = fleet_of([*lost, *good])
    assert len(fleet.look().jobs) == 45
    fleet.crew.slow_s = 1.0  # a good job that takes longer than this has a thread of its own
    fleet.limit_s = 0.5
    storage.hangs = {one.path for one in lost}
    fleet.look()
    while fleet.look().behind < len(lost):
        pass
    clock = fleet.clock
    assert isinstance(clock, StoryClock)
    clock.at += 10
    # On a busy machine a look may end before a good job is read.
    state = fleet.look()
    while {job.snapshot.now for job in state.jobs} != {clock.at}:
        state = fleet.look()
    assert {job.path for job in state.jobs} == {one.path for one in good}
    assert "has not responded for 10 s" in state.unreadable[lost[-1].path]
    assert threading.active_count() - before <= MOST_HANGING + SIZE
    storage.back.set()
    while fleet.look().unreadable:
        pass


def test_a_list_of_jobs_that_hangs_leaves_the_known_jobs(jobs: list[RunDir]) -> None:
    places, back = [Place(run_dir=one) for one in jobs], threading.Event()
    hangs = False

    def listed() -> list[Place]:
        if hangs:
            back.wait(PATIENT_S)
        return places

    fleet = fleet_of(jobs)
    fleet.places = listed
    assert len(fleet.look().jobs) == len(jobs)
    fleet.crew.slow_s = 0.05
    hangs = True
    assert len(fleet.look().jobs) == len(jobs)
    back.set()


def test_what_is_not_known_yet_is_said(jobs: list[RunDir]) -> None:
    back, fleet = threading.Event(), fleet_of(jobs)
    fleet.places = lambda: (back.wait(PATIENT_S) and [Place(run_dir=one) for one in jobs]) or []
    fleet.crew.slow_s = 0.01
    assert "still being listed" in fleet.look().others.problem
    back.set()
    while len((state := fleet.look()).jobs) < len(jobs):
        pass
    assert state.others.problem == ""


def test_an_error_of_the_list_is_that_of_the_look(jobs: list[RunDir]) -> None:
    def fails() -> list[Place]:
        raise JobError("the index is away")

    fleet = fleet_of(jobs)
    fleet.places = fails
    with pytest.raises(JobError, match="the index is away"):
        fleet.look()


def test_the_account_of_a_read_job_stays_as_it_was(jobs: list[RunDir]) -> None:
    """Pages and metrics are made while the next look goes on."""
    (job, *_) = (fleet := fleet_of(jobs[:1])).look().jobs
    before = job.time
    reader = fleet.readers[job.path]
    reader.account.slow[1] = 0.9
    reader.account.elapsed += 1000
    assert job.time == before


def test_a_journal_that_shrinks_is_read_again(jobs: list[RunDir]) -> None:
    """A leader removes lines that it could not act on, and a new file may get an old number."""
    fleet = fleet_of(jobs[:1])
    fleet.look()
    journal = jobs[0].journal
    first, *_ = journal.read_bytes().splitlines(keepends=True)
    with journal.open("r+b") as file:
        file.truncate(len(first))
    (job,) = fleet.look().jobs
    assert job.lines == 1
