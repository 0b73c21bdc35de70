"""Jobs whose run directory is in a cluster, with a local copy."""

import fcntl
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from msgspec.structs import replace

from orchestrator.app import cancel_job, remote
from orchestrator.app.launch_statuses import launch_statuses
from orchestrator.app.remote import Found, await_begin, lines_before, refresh, refresh_all, settled
from orchestrator.backends.kubernetes.mirror.mirror_paths import folder_of
from orchestrator.backends.kubernetes.mirror.remote import Remote, write_remote
from orchestrator.contract.files.run_dir import RunDir
from orchestrator.contract.launch import LaunchPlan
from orchestrator.contract.messages.actions import Ending
from orchestrator.contract.messages.events import CancelRequested, Event, LeaderStarted
from orchestrator.errors import BackendError, JobError, Unreachable
from orchestrator.job.state import Run
from orchestrator.journal.journal import Journal
from orchestrator.journal.supervisor import Supervisor
from orchestrator.seams import Completed, LaunchStatus
from tests.agent.world import TurnedClock, a_job
from tests.dashboard.dashboard_story import started
from tests.jobs_on_disk import NoCluster, cluster

__all__ = ["cluster"]
NOW = TurnedClock().now()


@dataclass
class FakeMirror:
    run_dir: RunDir
    new_events: list[tuple[Event, ...]] = field(default_factory=list)
    """The events that each refresh adds."""
    broken: bool = False
    unreachable: bool = False
    """The cluster is unreachable."""
    has_begun: bool = True
    led_at: float | None = None
    cluster: str = "prod"
    stale: BackendError | None = None
    stopping: bool = False
    looked: int = 0
    released: bool = False
    remembered: list[tuple[str, str]] = field(default_factory=list)
    logs_of: list[tuple[str, ...]] = field(default_factory=list)

    def here(self, launch: LaunchPlan) -> LaunchPlan:
        return replace(launch, job="as-here")

    def refresh(self) -> None:
        self.looked += 1
        self.stale = None
        if self.unreachable:
            self.stale = Unreachable("prod cannot be reached: refused", fix="`kubectl` tells")
        if self.broken:
            self.stale = BackendError("no right to pods/exec", fix="ask for it")
        if self.stale is not None:
            raise self.stale
        if self.new_events:
            write(self.run_dir, *self.new_events.pop(0))
            self.has_begun = True

    def fetch_logs(self, hosts: Collection[str] = (), *, follow: bool = False) -> Sequence[str]:
        self.logs_of.append(tuple(hosts))
        return ()

    def cancel(self, by: str) -> Completed | None:
        return None

    def deletion(self) -> str:
        return ""

    def snapshot(self) -> Completed | None:
        return None

    def profile(self, ranks: Sequence[int], steps: int, wait_s: float) -> Completed | None:
        return None

    def exec_on(
        self,
        host: str,
        argv: Sequence[str],
        out: Callable[[bytes], object],
        err: Callable[[bytes], object],
        given: int | None,
    ) -> int:
        out(f"{host}: {' '.join(argv)}".encode())
        return 3

    def let_go(self) -> None:
        self.released = True

    def remember(self, ending: Ending, why: str) -> None:
        self.remembered.append((ending, why))


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
    return Found(run_dir, FakeMirror(run_dir))


def copy_of(found: Found) -> FakeMirror:
    assert isinstance(found.copy, FakeMirror)
    return found.copy


# How a job is found


def mirror(run_root: Path, context: str, namespace: str, job: str) -> None:
    folder = folder_of(run_root, context, namespace, job)
    folder.mkdir(parents=True)
    remote_json = Remote(
        context=context,
        namespace=namespace,
        kind="pytorchjob",
        job=job,
        run_dir="/runs/job",
        python="python3",
        launch=1,
    )
    write_remote(folder, remote_json)


def test_a_job_name_in_two_clusters_must_be_given_with_the_cluster(tmp_path: Path) -> None:
    for namespace in ("a", "b"):
        mirror(tmp_path, "prod/eu", namespace, "job")
    with pytest.raises(
        JobError, match=r"several jobs are named job: in prod%2Feu/a, prod%2Feu/b"
    ) as failed:
        remote.find(tmp_path, "job", None, {}, TurnedClock())
    assert "--namespace" in failed.value.fix


def test_the_folder_of_a_copy_may_be_given_as_the_run_root(tmp_path: Path) -> None:
    mirror(tmp_path, "prod", "a", "job")
    folder = folder_of(tmp_path, "prod", "a", "job")
    write(RunDir(folder), submitted(RunDir(folder)))
    found = remote.find(folder.parent, "job", None, {}, TurnedClock())
    assert found.run_dir.path == folder
    assert found.copy is not None


def test_for_an_unknown_job_the_error_suggests_a_cluster(tmp_path: Path) -> None:
    with pytest.raises(JobError) as failed:
        remote.find(tmp_path, "job", None, {}, TurnedClock())
    assert "--backend kubernetes" in failed.value.fix


def test_a_local_run_directory_needs_no_copy(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "job")
    write(run_dir, submitted(run_dir))
    mirror(tmp_path, "prod", "a", "job")
    assert remote.find(tmp_path, "job", None, {}, TurnedClock()).copy is None


def test_the_scheduler_is_asked_with_the_launch_as_this_machine_knows_it(found: Found) -> None:
    write(found.run_dir, submitted(found.run_dir))
    run = Run(job=a_job(found.run_dir.path))
    here = found.here(run)
    assert here.job is not None
    assert here.job.launch.job == "as-here"
    assert Found(found.run_dir).here(run) is run


# Refreshes


def test_a_copy_that_cannot_be_updated_says_why(found: Found) -> None:
    copy_of(found).broken = True
    with pytest.raises(BackendError):
        refresh(found)
    write(found.run_dir, submitted(found.run_dir))
    refresh(found)
    assert found.stale is not None
    assert found.stale.message == "no right to pods/exec"
    refresh_all([found, Found(found.run_dir)])
    copy_of(found).broken = False
    refresh_all([found])
    assert found.stale is None


def test_an_unreachable_cluster_is_asked_once_for_all_its_jobs(tmp_path: Path) -> None:
    def a_copy(number: int, cluster: str) -> Found:
        run_dir = RunDir(tmp_path / f"job-{number}")
        write(run_dir, submitted(run_dir))
        return Found(run_dir, FakeMirror(run_dir, unreachable=cluster == "prod", cluster=cluster))

    prod, test = [a_copy(at, "prod") for at in range(5)], [a_copy(at, "test") for at in (5, 6)]
    refresh_all([*prod, *test])
    assert sum(copy_of(one).looked for one in prod) == 1
    assert all(one.stale is not None for one in prod)
    assert [(copy_of(one).looked, one.stale) for one in test] == [(1, None), (1, None)]


# The state of a job, from the copy and its scheduler


def asked(found: Found, cluster: NoCluster, says: LaunchStatus) -> LaunchStatus:
    cluster.says = says
    run = Run(job=a_job(found.run_dir.path, backend="kubernetes"))
    (seen,) = launch_statuses([(found, run, False, True)], {}, TurnedClock())
    return seen


RUNS = LaunchStatus("2 of 2 pods run", held=True, running=True)
WAITS = LaunchStatus("it waits for GPUs", held=True)
PENDING = LaunchStatus("Pending", held=True)


def test_a_cluster_that_was_just_unreachable_is_not_asked_again(
    found: Found, cluster: NoCluster
) -> None:
    copy_of(found).stale, copy_of(found).led_at = (
        Unreachable("prod is unreachable", fix="look"),
        70.0,
    )
    seen = asked(found, cluster, RUNS)
    assert (seen.words, seen.unknown, seen.fix) == ("Slurm job 12", "prod is unreachable", "look")
    assert (seen.held, seen.at, cluster.asked) == (True, 70.0, 0)


def test_the_state_of_pods_that_cannot_be_read_is_unknown(found: Found, cluster: NoCluster) -> None:
    copy_of(found).stale = BackendError("no right to pods/exec", fix="ask for it")
    assert asked(found, cluster, RUNS).unknown == "no right to pods/exec"
    assert asked(found, cluster, WAITS) == WAITS, "no leader can live there"
    copy_of(found).stale = None
    assert asked(found, cluster, RUNS) == RUNS


def test_an_end_that_the_journal_lacks_is_stored(found: Found, cluster: NoCluster) -> None:
    leaving = LaunchStatus("it was deleted", held=False, over="CANCELLED", leaving=True)
    asked(found, cluster, leaving)
    assert copy_of(found).remembered == []
    asked(found, cluster, replace(leaving, leaving=False))
    assert copy_of(found).remembered == [("CANCELLED", "it was deleted")]


def test_the_schedulers_answer_is_shown_until_the_leader_starts(found: Found) -> None:
    copy, said, told = copy_of(found), iter([PENDING, PENDING, RUNS]), list[object]()
    copy.has_begun = False
    copy.new_events = [(), (), (submitted(found.run_dir),)]
    beginnings = iter([False, False, True])

    def look() -> None:
        copy.has_begun = next(beginnings)

    copy.refresh = look  # type: ignore[method-assign]
    assert await_begin(found, lambda run: next(said), TurnedClock(), told.append)
    assert told == ["Pending", "2 of 2 pods run"]


def test_waiting_ends_if_the_leader_never_starts(found: Found) -> None:
    copy_of(found).has_begun, told = False, list[object]()
    assert not await_begin(found, lambda run: None, TurnedClock(), told.append)
    assert "ndctl logs" in str(told)


def test_the_report_of_a_resumed_job_starts_with_its_launch(found: Found) -> None:
    first, again = submitted(found.run_dir, NOW, 1), submitted(found.run_dir, NOW + 9, 2)
    write(found.run_dir, first)
    assert lines_before(found, NOW) == 0
    write(found.run_dir, *ended(NOW + 5), again)
    assert lines_before(found, NOW + 9) == 3


def test_a_result_older_than_the_submission_is_ignored(found: Found) -> None:
    write(found.run_dir, submitted(found.run_dir), *ended(NOW + 100))
    assert lines_before(found, NOW + 100) == 0  # the job ended quickly, and clocks differ
    with pytest.raises(JobError, match=r"nothing was started: launch 3 .* CANCELLED") as failed:
        lines_before(found, NOW + 200)
    assert "--resume" in failed.value.fix


def test_the_last_lines_of_a_copy_are_awaited(found: Found) -> None:
    clock = TurnedClock()
    over = settled(found, lambda: True, clock)
    assert not over()
    clock.sleep(remote.LAST_LINES_S)
    assert over()
    assert settled(Found(found.run_dir), lambda: True, clock)()


# The end of a job


@pytest.mark.parametrize(
    ("held", "waits_s"), [(None, cancel_job.LAST_WORDS_S), ("2 pods run", 40.0)]
)
def test_cancel_waits_a_limited_time_for_a_lost_leader(
    found: Found,
    cluster: NoCluster,
    held: str | None,
    waits_s: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cancel_job, "COME_BACK_S", 40.0)
    write(found.run_dir, submitted(found.run_dir))
    cluster.held, clock = held, TurnedClock()
    with pytest.raises(JobError, match="died before") as failed:
        cancel_job.wait_until_ended(found.run_dir, {}, clock, found)
    assert "ndctl cancel job" in failed.value.fix
    assert waits_s <= clock.now() - NOW < waits_s + 1


def test_cancel_waits_for_a_live_leader_and_for_one_that_returns(
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

    said = cancel_job.wait_until_ended(found.run_dir, {}, Days(), found)
    assert said == "job: CANCELLED, cancelled by me"


def test_cancel_reads_the_end_that_the_leader_wrote(found: Found, cluster: NoCluster) -> None:
    """A job that was cancelled before its leader started. The time in its first line changed with
    the submission, so the line has another length."""
    write(found.run_dir, submitted(found.run_dir, 1700000000.0))
    guessed = found.run_dir.journal.stat().st_size

    class Begins(TurnedClock):
        def sleep(self, seconds: float) -> None:
            self.time += seconds
            found.run_dir.journal.unlink()
            write(found.run_dir, submitted(found.run_dir, 1700000001.234567), *ended(self.time))

    said = cancel_job.wait_until_ended(found.run_dir, {}, Begins(), found)
    assert said == "job: CANCELLED, cancelled by me"
    assert found.run_dir.journal.read_bytes().index(b"\n") + 1 > guessed


def test_the_log_of_a_rank_is_fetched_only_from_its_host(found: Found) -> None:
    remote.fetch_logs(found, 3, None)
    write(found.run_dir, *started())
    remote.fetch_logs(found, 3, None)
    remote.fetch_logs(found, 0, 1)
    remote.fetch_logs(found, 0, 7)
    remote.fetch_logs(found, None, None)
    assert copy_of(found).logs_of == [(), ("host-1",), ("host-0",), (), ()]
