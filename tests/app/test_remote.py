"""Jobs whose run directory is elsewhere, with a copy that a test writes."""

import fcntl
import json
import os
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from orchestrator.app import cancelling, remote
from orchestrator.app.remote import Found, await_begin, lines_before, refresh, refresh_all, settled
from orchestrator.backends.kubernetes.places import folder_of
from orchestrator.contract.events import CancelRequested, Event, LeaderStarted
from orchestrator.contract.launch import LaunchPlan
from orchestrator.contract.rundir import RunDir
from orchestrator.errors import BackendError, JobError
from orchestrator.seams import Completed
from orchestrator.supervise.log import Journal
from orchestrator.supervise.loop import Supervisor
from orchestrator.supervise.state import Run
from tests.agent.world import TurnedClock, a_job
from tests.dashboard.dashboard_story import started
from tests.jobs_on_disk import NoCluster, cluster

__all__ = ["cluster"]
NOW = TurnedClock().now()


@dataclass
class ACopy:
    run_dir: RunDir
    comes: list[tuple[Event, ...]] = field(default_factory=list)
    """What each look brings."""
    broken: bool = False
    has_begun: bool = True
    logs_of: list[tuple[str, ...]] = field(default_factory=list)

    def here(self, launch: LaunchPlan) -> LaunchPlan:
        return replace(launch, job="as-here")

    def refresh(self) -> None:
        if self.broken:
            raise BackendError("the API server does not answer")
        if self.comes:
            write(self.run_dir, *self.comes.pop(0))
            self.has_begun = True

    def fetch_logs(self, hosts: Collection[str] = (), *, follow: bool = False) -> None:
        self.logs_of.append(tuple(hosts))

    def cancel(self) -> Completed | None:
        return None


def write(run_dir: RunDir, *events: Event) -> None:
    run_dir.path.mkdir(parents=True, exist_ok=True)
    with Journal(run_dir.journal, TurnedClock()) as journal:
        supervisor = Supervisor(journal)
        for event in events:
            supervisor.feed(event)


def submitted(run_dir: RunDir, at: float = NOW, launch: int = 3) -> Event:
    job = a_job(run_dir.path, at=at, backend="kubernetes")
    return replace(job, launch=replace(job.launch, launch=launch))


def ended(at: float) -> tuple[Event, ...]:
    return LeaderStarted(at=at, host="host-0", pid=1), CancelRequested(at=at, by="me")


@pytest.fixture
def found(tmp_path: Path) -> Found:
    run_dir = RunDir(tmp_path / "job")
    return Found(run_dir, ACopy(run_dir))


def copy_of(found: Found) -> ACopy:
    assert isinstance(found.copy, ACopy)
    return found.copy


# Where a job is found


def mirror(run_root: Path, context: str, namespace: str, job: str) -> None:
    folder = folder_of(run_root, context, namespace, job)
    folder.mkdir(parents=True)
    (folder / "remote.json").write_text(json.dumps({"context": context}))


def test_a_job_of_two_places_has_to_be_named_with_one(tmp_path: Path) -> None:
    for namespace in ("a", "b"):
        mirror(tmp_path, "prod/eu", namespace, "job")
    with pytest.raises(JobError, match=r"several jobs job: in prod%2Feu/a, prod%2Feu/b") as failed:
        remote.find(tmp_path, "job", None, {}, TurnedClock())
    assert "--namespace" in failed.value.fix


def test_a_job_that_is_nowhere_may_be_in_a_cluster(tmp_path: Path) -> None:
    with pytest.raises(JobError) as failed:
        remote.find(tmp_path, "job", None, {}, TurnedClock())
    assert "--backend kubernetes" in failed.value.fix


def test_a_run_directory_that_is_here_needs_no_copy(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "job")
    write(run_dir, submitted(run_dir))
    mirror(tmp_path, "prod", "a", "job")
    assert remote.find(tmp_path, "job", None, {}, TurnedClock()).copy is None


def test_a_scheduler_is_asked_for_the_job_as_this_machine_sees_it(found: Found) -> None:
    write(found.run_dir, submitted(found.run_dir))
    run = Run(job=a_job(found.run_dir.path))
    here = found.here(run)
    assert here.job is not None
    assert here.job.launch.job == "as-here"
    assert Found(found.run_dir).here(run) is run


# Looks


def test_what_was_known_before_is_shown_with_a_warning(found: Found) -> None:
    copy_of(found).broken = True
    with pytest.raises(BackendError):
        refresh(found)
    assert refresh_all([found, Found(found.run_dir)]) == ["the API server does not answer"]
    write(found.run_dir, submitted(found.run_dir))
    assert "what was known before" in refresh(found)


def test_what_the_scheduler_says_is_told_until_the_leader_begins(found: Found) -> None:
    copy, said, told = copy_of(found), iter(["Pending", "Pending", "Running"]), list[object]()
    copy.has_begun = False
    copy.comes = [(), (), (submitted(found.run_dir),)]
    beginnings = iter([False, False, True])

    def look() -> None:
        copy.has_begun = next(beginnings)

    copy.refresh = look  # type: ignore[method-assign]
    assert await_begin(found, lambda run: next(said), TurnedClock(), told.append)
    assert told == ["Pending", "Running"]


def test_a_leader_that_never_comes_is_not_waited_for(found: Found) -> None:
    copy_of(found).has_begun, told = False, list[object]()
    assert not await_begin(found, lambda run: None, TurnedClock(), told.append)
    assert "ndctl logs" in str(told)


def test_a_resumed_jobs_story_begins_with_its_launch(found: Found) -> None:
    first, again = submitted(found.run_dir, NOW, 1), submitted(found.run_dir, NOW + 9, 2)
    write(found.run_dir, first)
    assert lines_before(found, NOW) == 0
    write(found.run_dir, *ended(NOW + 5), again)
    assert lines_before(found, NOW + 9) == 3


def test_a_result_that_is_older_than_the_submission_is_not_its_own(found: Found) -> None:
    write(found.run_dir, submitted(found.run_dir), *ended(NOW + 100))
    assert lines_before(found, NOW + 100) == 0  # an end that came quickly, and clocks that differ
    with pytest.raises(JobError, match=r"nothing was run: launch 3 .* CANCELLED") as failed:
        lines_before(found, NOW + 200)
    assert "--resume" in failed.value.fix


def test_the_last_lines_of_a_copy_are_waited_for(found: Found) -> None:
    clock = TurnedClock()
    over = settled(found, lambda: True, clock)
    assert not over()
    clock.sleep(remote.LAST_LINES_S)
    assert over()
    assert settled(Found(found.run_dir), lambda: True, clock)()


# Its end


@pytest.mark.parametrize(
    ("held", "waits_s"), [(None, cancelling.LAST_WORDS_S), ("2 pods run", 40.0)]
)
def test_cancel_waits_for_a_leader_that_went_away_no_longer_than_it_may_take(
    found: Found,
    cluster: NoCluster,
    held: str | None,
    waits_s: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cancelling, "COME_BACK_S", 40.0)
    write(found.run_dir, submitted(found.run_dir))
    cluster.held, clock = held, TurnedClock()
    with pytest.raises(JobError, match="went away before") as failed:
        cancelling.wait_until_ended(found.run_dir, {}, clock, found)
    assert "ndctl cancel job" in failed.value.fix
    assert waits_s <= clock.now() - NOW < waits_s + 1


def test_cancel_waits_for_a_leader_that_is_there_and_for_one_that_comes_back(
    found: Found, cluster: NoCluster
) -> None:
    write(found.run_dir, submitted(found.run_dir))
    held = os.open(found.run_dir.journal, os.O_RDWR)
    fcntl.flock(held, fcntl.LOCK_EX)
    left_at, came_at = NOW + 100, NOW + 110

    class Days(TurnedClock):
        def sleep(self, seconds: float) -> None:
            nonlocal held
            self.time += 10 * seconds
            if self.time > left_at and held:
                os.close(held)
                held = 0
            if self.time > came_at:
                write(found.run_dir, *ended(self.time))

    said = cancelling.wait_until_ended(found.run_dir, {}, Days(), found)
    assert said == "job: CANCELLED, cancelled by me"


def test_cancel_reads_what_the_leader_wrote_in_the_place_of_a_guess(
    found: Found, cluster: NoCluster
) -> None:
    """Of a job that was cancelled before its leader had begun, and which was handed over at another
    time than it began: its first line is not as long."""
    write(found.run_dir, submitted(found.run_dir, 1700000000.0))
    guessed = found.run_dir.journal.stat().st_size

    class Begins(TurnedClock):
        def sleep(self, seconds: float) -> None:
            self.time += seconds
            found.run_dir.journal.unlink()
            write(found.run_dir, submitted(found.run_dir, 1700000001.234567), *ended(self.time))

    said = cancelling.wait_until_ended(found.run_dir, {}, Begins(), found)
    assert said == "job: CANCELLED, cancelled by me"
    assert found.run_dir.journal.read_bytes().index(b"\n") + 1 > guessed


def test_the_log_of_one_rank_is_asked_of_its_host_alone(found: Found) -> None:
    remote.fetch_logs(found, 3, None)
    write(found.run_dir, *started())
    remote.fetch_logs(found, 3, None)
    remote.fetch_logs(found, 0, 1)
    remote.fetch_logs(found, 0, 7)
    remote.fetch_logs(found, None, None)
    assert copy_of(found).logs_of == [(), ("host-1",), ("host-0",), (), ()]
