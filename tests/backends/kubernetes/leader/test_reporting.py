"""Reports of a leader to Kubernetes, which a thread sends, and their behaviour on errors."""

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
from msgspec.structs import replace

from ndctl.rank.fence import GivenUp
from orchestrator.backends.entry.leader import _reporting
from orchestrator.backends.kubernetes.api.api_errors import Conflict, Expired, Forbidden
from orchestrator.backends.kubernetes.api.client import Api
from orchestrator.backends.kubernetes.leader.own_job import OwnJob
from orchestrator.backends.kubernetes.leader.reporting import (
    MOST_WAITING,
    REFUSED_S,
    SOON_S,
    STEP_S,
    Channel,
    LeaderReporter,
    Written,
    due_s,
    event_of,
)
from orchestrator.backends.kubernetes.observe.reports import from_data, from_events, to_data
from orchestrator.backends.kubernetes.resources import JOB_KINDS, Object, Resource
from orchestrator.contract.files.run_dir import RunDir
from orchestrator.contract.messages.events import Event
from orchestrator.errors import Unanswered, Unreachable
from orchestrator.job.reports.job_news import News, TellsCluster
from orchestrator.job.reports.job_report import JobReport
from orchestrator.job.state import Run
from orchestrator.job.transitions import step
from orchestrator.journal.supervisor import Supervisor
from orchestrator.seams import AllocationBackend
from orchestrator.system import SystemClock
from tests.agent.world import TurnedClock
from tests.backends.kubernetes.rendered import PLAIN, a_launch
from tests.dashboard.dashboard_story import START, finished, restarting, started

KIND = JOB_KINDS["pytorchjob"]
LAUNCH = a_launch(PLAIN)
WAIT_S = 30.0


def a_job(version: int = 1, launch: int = 1) -> Object:
    return {
        "metadata": {
            "name": "job",
            "uid": "uid-1",
            "resourceVersion": str(version),
            "annotations": {"ndctl.dev/launch": str(launch)},
        }
    }


@dataclass
class Server:
    """An API server that records each report, or raises what a test sets."""

    job: Object | None = field(default_factory=a_job)
    events: list[Object] = field(default_factory=list)
    maps: list[dict[str, Any]] = field(default_factory=list)
    trouble: Exception | None = None
    held: threading.Event | None = None
    """A request waits until this event is set, as with a slow API server."""
    watches: "list[list[Object | Exception]]" = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    clock: Any = field(default_factory=SystemClock)

    def _meet(self) -> None:
        if self.held is not None:
            self.held.wait(WAIT_S)
        if self.trouble is not None:
            raise self.trouble

    def get(self, resource: Resource, namespace: str, name: str) -> Object | None:
        self.asked.append("get")
        self._meet()
        return self.job

    def create(self, item: Object, namespace: str) -> Object:
        self._meet()
        if item["metadata"]["name"] in {one["metadata"]["name"] for one in self.events}:
            raise Conflict("it is there")
        self.events.append(item)
        return item

    def merge(self, resource: Resource, namespace: str, name: str, change: Any) -> Object:
        self._meet()
        assert name == "job-state"
        self.maps.append(change)
        made: Object = change
        return made

    def watch(self, *_: Any, **asked: Any) -> Iterator[Object]:
        self.asked.append(f"watch {asked['fields']} from {asked['version']}")
        for one in self.watches.pop(0) if self.watches else []:
            if isinstance(one, Exception):
                raise one
            yield one
        if not self.watches:
            time.sleep(0.01)


def a_reporter(
    server: Server, run_dir: Path, clock: Any = None, guard: Any = lambda: None
) -> LeaderReporter:
    server.clock = clock or server.clock
    own = OwnJob(cast("Api", server), KIND, "team", LAUNCH)
    return LeaderReporter(own, RunDir(run_dir), guard, "job-master-0", None)


def heard(reporter: LeaderReporter, events: list[Event]) -> Run:
    run = Run()
    for event in events:
        before, (run, _) = run, step(run, event)
        reporter.hear(before, event, run)
    return run


def wait_for(holds: Any) -> None:
    deadline = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def reasons(server: Server) -> list[str]:
    return [str(one["reason"]) for one in server.events]


def test_a_jobs_history_is_reported_and_its_end_as_the_leader_exits(tmp_path: Path) -> None:
    server = Server()
    reporter = a_reporter(server, tmp_path)
    reporter.begin()
    heard(reporter, finished())
    reporter.close()
    assert reasons(server) == ["Started", "Incident", "Recovering", "Recovered", "Ended"]
    about = server.events[0]["involvedObject"]
    assert about == {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "name": "job",
        "namespace": "team",
        "uid": "uid-1",
    }
    last = [one for one in server.maps if "data" in one][-1]
    assert last["data"]["state"] == "SUCCEEDED"
    (owned,) = (one for one in server.maps if "ownerReferences" in one["metadata"])
    assert owned["metadata"]["ownerReferences"][0]["uid"] == "uid-1", (
        "the ConfigMap must be deleted with the job"
    )
    report = from_data(last["data"])
    assert report is not None
    assert (report.step, report.steps, report.attempt) == (60, 60, 2)
    assert from_events(server.events, "job") is not None


def test_a_slow_server_never_blocks_the_leader(tmp_path: Path) -> None:
    """The queue of reports has a limit."""
    server = Server(held=threading.Event())
    reporter = a_reporter(server, tmp_path)
    reporter.begin()
    began = time.monotonic()
    for _ in range(200):
        heard(reporter, restarting())
    assert time.monotonic() - began < WAIT_S / 2
    assert len(reporter.waiting) <= MOST_WAITING
    assert server.held is not None
    server.held.set()
    wait_for(lambda: server.maps)
    reporter.close()


def test_an_unreachable_server_delays_the_leaders_exit_by_seconds_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.backends.kubernetes.leader.reporting.FAREWELL_S", 0.2)
    server = Server(held=threading.Event())
    reporter = a_reporter(server, tmp_path)
    reporter.begin()
    heard(reporter, finished())
    began = time.monotonic()
    reporter.close()
    assert time.monotonic() - began < WAIT_S / 2
    assert server.events == []
    assert server.held is not None
    server.held.set()


def test_reports_that_a_server_missed_are_sent_when_it_returns(tmp_path: Path) -> None:
    server, clock = Server(trouble=Unreachable("away")), TurnedClock()
    reporter = a_reporter(server, tmp_path, clock)
    reporter.own.seen.set()
    heard(reporter, restarting())
    assert reporter._tell() <= 2.0, "the retry must not wait for the interval of steps"
    assert (server.events, server.maps) == ([], [])
    server.trouble = None
    clock.sleep(5.0)
    reporter._tell()
    assert reasons(server) == ["Started", "Incident", "Recovering"]
    assert server.maps[-1]["data"]["state"] == "RECOVERING"


def test_a_leader_that_exits_retries_unsent_reports_once(tmp_path: Path) -> None:
    server, clock = Server(trouble=Unreachable("away")), TurnedClock()
    reporter = a_reporter(server, tmp_path, clock)
    reporter.own.seen.set()
    heard(reporter, finished())
    reporter._tell()
    server.trouble = None
    reporter._tell(last=True)
    assert reasons(server)[-1] == "Ended"
    assert server.maps[0]["data"]["state"] == "SUCCEEDED"


def test_an_event_whose_answer_was_lost_is_created_once(tmp_path: Path) -> None:
    server, clock = Server(), TurnedClock()
    reporter = a_reporter(server, tmp_path, clock)
    reporter.own.seen.set()
    heard(reporter, started())
    reporter._tell()
    before = len(server.events)
    reporter.waiting.append(News(reason="Started", text="x", at=START))
    reporter._tell()
    reporter.waiting.append(News(reason="Started", text="x", at=START))
    reporter._tell()
    assert len(server.events) == before + 1
    assert not reporter.waiting


def test_a_leader_that_was_superseded_reports_nothing_more(tmp_path: Path) -> None:
    def guard() -> None:
        raise GivenUp("another leader has taken over")

    server = Server()
    reporter = a_reporter(server, tmp_path, guard=guard)
    reporter.begin()
    heard(reporter, started())
    reporter.close()
    assert not reporter.thread.is_alive()
    assert (server.events, server.maps) == ([], [])


def test_a_missing_right_is_logged_once_and_retried_later(caplog: pytest.LogCaptureFixture) -> None:
    clock, channel = TurnedClock(), Channel("events cannot be made")
    tries: list[float] = []

    def tell() -> None:
        tries.append(clock.monotonic())
        raise Forbidden("job-pods may not create events in namespace team", fix="ask for it")

    for _ in range(3):
        assert not channel.told(clock, tell)
        clock.sleep(REFUSED_S + 1.0)
    assert len(tries) == 3
    assert not channel.told(clock, tell)
    clock.sleep(1.0)
    assert not channel.told(clock, tell)
    assert len(tries) == 4, "the retry must wait for its interval"
    said = [one.getMessage() for one in caplog.records]
    assert len(said) == 1
    assert "training continues: job-pods may not create events" in said[0]
    assert "fix: ask for it" in said[0]


def test_an_unreachable_server_is_retried_soon() -> None:
    clock, channel = TurnedClock(), Channel("x")

    def away() -> None:
        raise Unanswered("away")

    waits = []
    for _ in range(5):
        assert not channel.told(clock, away)
        waits.append(channel.again_at - clock.monotonic())
        clock.sleep(waits[-1])
    assert waits == [2.0, 5.0, 15.0, 30.0, 30.0]
    assert channel.told(clock, lambda: None)
    assert channel.failures == 0


REPORT = JobReport(
    launch=3,
    state="RUNNING",
    message="attempt 2 trains",
    step=823,
    steps=5000,
    attempt=2,
    updated=1795456109.0,
    checkpoint=800,
    culprit="rank 3 on node2",
    loss=1.7865,
)


def test_state_is_written_at_once_and_steps_at_intervals() -> None:
    written = Written(report=REPORT, at=100.0)
    assert due_s(REPORT, None, 100.0) == 0.0
    steps = replace(REPORT, step=900, loss=1.5, updated=REPORT.updated + 9)
    assert due_s(steps, written, 110.0) == STEP_S - 10.0
    assert due_s(steps, written, 100.0 + STEP_S) == 0.0
    for change in ({"state": "RECOVERING"}, {"attempt": 3}, {"culprit": ""}, {"checkpoint": 900}):
        news: dict[str, Any] = change
        assert due_s(replace(REPORT, **news), written, 100.5) == SOON_S - 0.5
        assert due_s(replace(REPORT, **news), written, 101.5) == 0.0


def test_a_report_is_read_as_it_was_written() -> None:
    assert from_data(to_data(REPORT)) == REPORT
    bare = replace(REPORT, culprit="", checkpoint=0, loss=None)
    assert from_data(to_data(bare)) == bare
    long = replace(REPORT, message="x" * 9999)
    back = from_data(to_data(long))
    assert back is not None
    assert len(back.message) == 512


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"state": "RUNNING"},
        {"state": "RUNNING", "updated": "yesterday"},
        {"state": "DANCING", "updated": "2026-11-23T17:06:06Z"},
        {"state": "RUNNING", "updated": "2026-11-23T17:06:06Z", "step": "many"},
    ],
)
def test_foreign_text_is_no_report(data: dict[str, str]) -> None:
    assert from_data(data) is None


def test_an_events_name_is_made_from_its_text() -> None:
    one = News(reason="Incident", text="rank 3 was killed", warning=True, at=START)
    made = event_of(one, REPORT, KIND, "team", "job")
    assert made == event_of(one, REPORT, KIND, "team", "job")
    other = event_of(replace(one, text="rank 4 was killed"), REPORT, KIND, "team", "job")
    assert made["metadata"]["name"] != other["metadata"]["name"]
    assert (made["type"], made["reason"]) == ("Warning", "Incident")
    assert made["metadata"]["namespace"] == made["involvedObject"]["namespace"] == "team"


# The watch on the own job


def followed(server: Server) -> OwnJob:
    server.clock = TurnedClock()
    own = OwnJob(cast("Api", server), KIND, "team", LAUNCH)
    own.begin()
    return own


def test_the_watch_reports_a_deleted_job() -> None:
    server = Server()
    server.watches = [
        [{"type": "MODIFIED", "object": a_job(2)}, {"type": "BOOKMARK", "object": a_job(3)}],
        [{"type": "DELETED", "object": a_job(4)}],
    ]
    own = followed(server)
    assert own.gone.wait(WAIT_S)
    assert server.asked[1] == "watch metadata.name=job from 1"
    assert own.uid == "uid-1"


@pytest.mark.parametrize("job", [None, a_job(launch=2)])
def test_an_absent_or_foreign_job_counts_as_deleted(job: Object | None) -> None:
    assert followed(Server(job=job)).gone.wait(WAIT_S)


def test_an_expired_or_unanswered_watch_is_repeated() -> None:
    server = Server()
    server.watches = [
        [Expired("too old")],
        [Unanswered("away")],
        [{"type": "DELETED", "object": a_job(4)}],
    ]
    assert followed(server).gone.wait(WAIT_S)
    assert server.asked.count("get") == 3


def test_a_watch_that_is_refused_is_no_deletion() -> None:
    server = Server()
    server.watches = [[Forbidden("may not watch")] for _ in range(5)]
    own = followed(server)
    wait_for(lambda: len(server.watches) < 3)
    assert own.seen.is_set()
    assert not own.gone.is_set()
    server.job = None  # ends the thread
    assert own.gone.wait(WAIT_S)


# Reports of journal lines


class Lines:
    """A journal in memory."""

    def __init__(self) -> None:
        self.written: list[Event] = []

    def after(self, place: Any) -> list[Any]:
        return []

    def extend(self, decided: Any) -> tuple[()]:
        self.written += [event for event, _ in decided]
        return ()


def test_lines_are_reported_after_they_are_on_disk(tmp_path: Path) -> None:
    supervisor = Supervisor(Lines())  # type: ignore[arg-type]
    first, *rest = started()
    supervisor.feed(first)
    told: list[tuple[int, Event]] = []

    class Reporter:
        def hear(self, before: Run, event: Event, after: Run) -> None:
            told.append((len(supervisor.journal.written), event))  # type: ignore[attr-defined]
            assert step(before, event)[0] == after

        def close(self) -> None:
            told.append((-1, first))

    class Cluster:
        def reporter(self, launch: Any, run_dir: Any, guard: Any) -> Reporter:
            return Reporter()

    cluster: Any = Cluster()
    told_too: Any = TellsCluster
    assert isinstance(cluster, told_too)
    with _reporting(cluster, supervisor, RunDir(tmp_path), lambda: None):
        for event in rest:
            supervisor.feed(event)
    assert [event for _, event in told[:-1]] == rest
    assert [count for count, _ in told[:-1]] == list(range(2, len(rest) + 2))
    assert told[-1][0] == -1


def test_a_backend_without_a_cluster_gets_no_reports(tmp_path: Path) -> None:
    backend: AllocationBackend = object()  # type: ignore[assignment]
    supervisor = Supervisor(Lines())  # type: ignore[arg-type]
    supervisor.feed(started()[0])
    with _reporting(backend, supervisor, RunDir(tmp_path), lambda: None):
        assert supervisor.tell is None


def test_the_api_client_has_the_methods_that_the_reporter_calls() -> None:
    """The fake server has the signatures of the real client."""
    for name in ("get", "create", "merge", "watch"):
        assert callable(getattr(Api, name))
