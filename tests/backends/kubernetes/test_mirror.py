"""A copy of a run directory: what is expected, what comes, and what a later look changes."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.backends.kubernetes import fetch
from orchestrator.backends.kubernetes.api import Listed
from orchestrator.backends.kubernetes.fetch import main
from orchestrator.backends.kubernetes.mirror import Mirror, contents
from orchestrator.backends.kubernetes.resources import Object, Resource
from orchestrator.contract.events import CancelRequested, Event, LeaderStarted
from orchestrator.contract.handover import Handover
from orchestrator.contract.rundir import RunDir
from orchestrator.dashboard.recalled import look, recall
from orchestrator.errors import BackendError, Unanswered
from orchestrator.supervise import snapshot
from orchestrator.supervise.log import Journal, Place, has_writer, read, to_line
from orchestrator.supervise.loop import Folded, Supervisor
from orchestrator.supervise.step import fold
from tests.agent.world import TurnedClock
from tests.backends.handed import handed
from tests.backends.kubernetes.rendered import PLAIN, a_launch


@dataclass
class Cluster:
    """Pods of one job, in which `fetch` is run on a run directory that is here."""

    there: RunDir
    pods: list[Object] = field(default_factory=list)
    lines: Sequence[bytes] = ()
    context: str = "prod"
    asked: list[str] = field(default_factory=list)
    silent: set[str] = field(default_factory=set)
    """Pods whose nodes do not answer."""
    read: list[str] = field(default_factory=list)
    """Pods whose log was asked for."""

    def list(self, resource: Resource, namespace: str, *, labels: str = "") -> Listed:
        return Listed(items=tuple(self.pods), version="1")

    def exec(
        self, namespace: str, pod: str, container: str, argv: Sequence[str], *, timeout_s: float
    ) -> tuple[int, bytes, bytes]:
        import io

        self.asked.append(pod)
        if pod in self.silent:
            raise Unanswered(f"pod {pod}: error dialing backend")
        if "cancel" in argv:
            return 0, b"is being cancelled\n", b""
        out = io.BytesIO()
        main([str(self.there.path), *argv[-2:]], out)
        return 0, out.getvalue(), b""

    def log(self, namespace: str, pod: str, container: str, **more: Any) -> Iterator[bytes]:
        self.read.append(pod)
        yield from self.lines


def a_pod(name: str, phase: str = "Running", *, ready: str = "True", **labels: str) -> Object:
    return {
        "metadata": {
            "name": name,
            "uid": f"uid-of-{name}",
            "labels": labels,
            "annotations": {"ndctl.dev/launch": "1"},
        },
        "spec": {"nodeName": f"node-of-{name}"},
        "status": {"phase": phase, "conditions": [{"type": "Ready", "status": ready}]},
    }


LEADER = {"training.kubeflow.org/replica-type": "master"}


@pytest.fixture
def there(tmp_path: Path) -> RunDir:
    (tmp_path / "there").mkdir()
    return RunDir(tmp_path / "there")


@pytest.fixture
def cluster(there: RunDir) -> Cluster:
    return Cluster(there, [a_pod("job-a-worker"), a_pod("job-master", **LEADER)])


@pytest.fixture
def copy(tmp_path: Path, cluster: Cluster) -> Mirror:
    made = Mirror(tmp_path / "here", cluster)  # type: ignore[arg-type]
    made.expect(of(cluster.there), "team")
    return made


def of(there: RunDir, launch: int = 1, *, resume: bool = False) -> Handover:
    plan = replace(a_launch(PLAIN, launch=launch), run_dir=str(there.path))
    return handed(plan, backend="kubernetes", resume=resume)


def happen(there: RunDir, *events: Event) -> None:
    with Journal(there.journal, TurnedClock()) as journal:
        supervisor = Supervisor(journal)
        for event in events:
            supervisor.feed(event)


END = (LeaderStarted(at=1.0, host="node-0", pid=1), CancelRequested(at=2.0, by="me"))


def same(copy: Mirror, there: RunDir) -> bool:
    return copy.run_dir.journal.read_bytes() == there.journal.read_bytes()


def test_a_long_journal_comes_in_one_look_and_with_the_snapshot(
    copy: Mirror, there: RunDir, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    happen(there, of(there).job, *END)
    lines = read(there.journal)
    place = Place(lines=2, offset=sum(len(to_line(entry)) for entry in lines[:2]))
    folded = Folded(run=fold(entry.event for entry in lines[:2]), place=place)
    snapshot.write(there, folded, lambda: None)
    monkeypatch.setattr(fetch, "MOST_JOURNAL", place.offset + 10)
    copy.refresh()
    assert same(copy, there)
    assert len(cluster.asked) == 2
    assert recall(copy.run_dir)[1].place == place
    assert look(copy.run_dir).run.cancelled_by == "me"


def test_until_the_leader_begins_there_is_a_guess_and_the_spec(copy: Mirror) -> None:
    assert not copy.has_begun
    assert len(read(copy.run_dir.journal)) == 1
    assert copy.run_dir.spec.read_text() == "name: job\n"
    copy.refresh()  # pods run that have no journal yet
    assert not copy.has_begun
    here = copy.here(a_launch(PLAIN))
    assert here.kubernetes is not None
    assert (here.kubernetes.context, here.kubernetes.namespace) == ("prod", "team")


def test_news_are_added_and_the_leaders_pod_is_asked(
    copy: Mirror, there: RunDir, cluster: Cluster
) -> None:
    happen(there, of(there).job)
    there.metrics.write_text('{"step":1}\n')
    copy.refresh()
    assert copy.has_begun
    assert same(copy, there)
    happen(there, *END)
    with there.metrics.open("a") as metrics:
        metrics.write('{"step":2}\n')
    copy.refresh()
    assert same(copy, there)
    assert copy.run_dir.metrics.read_text() == there.metrics.read_text()
    assert set(cluster.asked) == {"job-master"}


def test_while_the_journal_is_written_there_it_is_held_here(copy: Mirror, there: RunDir) -> None:
    with Journal(there.journal, TurnedClock()) as journal:
        journal.append(of(there).job)
        copy.refresh()
        assert has_writer(copy.run_dir.journal)
    copy.refresh()
    assert not has_writer(copy.run_dir.journal)


def test_a_resumed_launch_keeps_what_was_known_and_a_new_one_does_not(
    copy: Mirror, there: RunDir
) -> None:
    happen(there, of(there).job, *END)
    copy.refresh()
    copy.expect(of(there, 2, resume=True), "team")
    assert [entry.seq for entry in read(copy.run_dir.journal)] == [1, 2, 3, 4]
    copy.refresh()  # what is there is of the former launch
    assert not copy.has_begun
    happen(there, of(there, 2, resume=True).job)
    copy.refresh()
    assert copy.has_begun
    assert same(copy, there)
    copy.expect(of(there, 3), "team")
    assert len(read(copy.run_dir.journal)) == 1


def test_a_journal_that_began_anew_there_begins_anew_here(copy: Mirror, there: RunDir) -> None:
    happen(there, of(there).job, *END)
    copy.refresh()
    there.journal.unlink()
    happen(there, of(there).job, END[0])
    copy.refresh()
    copy.refresh()
    assert same(copy, there)


def test_without_a_running_pod_the_leaders_last_words_are_taken(
    copy: Mirror, there: RunDir, cluster: Cluster
) -> None:
    happen(there, of(there).job, *END)
    lines = there.journal.read_bytes().splitlines()
    cluster.lines = [b"leaving", *(b"ndctl-journal: " + one for one in lines)]
    cluster.lines = [*cluster.lines, b'ndctl-metrics: {"step":1}']
    cluster.pods = [a_pod("job-master", "Succeeded", **LEADER)]
    copy.refresh()
    assert copy.has_begun
    assert same(copy, there)
    assert copy.run_dir.metrics.read_text() == '{"step":1}\n'


def last_words(there: RunDir, since: int) -> list[bytes]:
    return [b"ndctl-journal: " + one for one in there.journal.read_bytes().splitlines()[since:]]


def test_of_a_long_journal_the_last_lines_are_put_behind_those_that_were_seen(
    copy: Mirror, there: RunDir, cluster: Cluster
) -> None:
    happen(there, of(there).job, END[0])
    copy.refresh()
    happen(there, END[1])
    cluster.pods = [a_pod("job-master", "Succeeded", **LEADER)]
    cluster.lines = last_words(there, 1)
    copy.refresh()
    assert same(copy, there)


def test_lines_that_never_came_are_not_made_up(
    copy: Mirror, there: RunDir, cluster: Cluster
) -> None:
    happen(there, of(there).job, *END)
    cluster.pods = [a_pod("job-master", "Succeeded", **LEADER)]
    cluster.lines = last_words(there, 2)
    before = copy.run_dir.journal.read_bytes()
    with pytest.raises(BackendError, match="has only the last lines") as failed:
        copy.refresh()
    assert str(there.journal) in str(failed.value.fix)
    assert copy.run_dir.journal.read_bytes() == before
    assert not copy.has_begun


def test_of_many_pods_that_have_ended_the_leaders_log_is_read_and_once(
    copy: Mirror, there: RunDir, cluster: Cluster
) -> None:
    happen(there, of(there).job, *END)
    cluster.lines = [b"ndctl-journal: " + one for one in there.journal.read_bytes().splitlines()]
    workers = [a_pod(f"job-worker-{number}", "Succeeded") for number in range(9)]
    cluster.pods = [*workers, a_pod("job-master", "Succeeded", **LEADER)]
    copy.refresh()
    copy.refresh()
    assert same(copy, there)
    assert cluster.read == ["job-master"]


def test_while_the_leaders_node_is_dead_another_pod_answers(
    copy: Mirror, there: RunDir, cluster: Cluster
) -> None:
    happen(there, of(there).job, *END)
    cluster.silent = {"job-master"}
    copy.refresh()
    assert same(copy, there)
    assert cluster.asked == ["job-master", "job-a-worker"]
    copy.refresh()
    assert cluster.asked[2:] == ["job-a-worker"], "who answered is asked again"
    done = copy.cancel()
    assert done is not None
    assert done.out == "is being cancelled"
    assert cluster.asked[-2:] == ["job-master", "job-a-worker"]


def test_pods_that_are_not_ready_are_asked_last(
    copy: Mirror, there: RunDir, cluster: Cluster
) -> None:
    happen(there, of(there).job)
    cluster.pods[1] = a_pod("job-master", ready="Unknown", **LEADER)
    copy.refresh()
    assert cluster.asked == ["job-a-worker"]


def test_where_no_pod_answers_what_was_known_stays_and_cancel_finds_nobody(
    copy: Mirror, there: RunDir, cluster: Cluster
) -> None:
    happen(there, of(there).job)
    copy.refresh()
    cluster.silent = {"job-master", "job-a-worker"}
    with pytest.raises(Unanswered, match="error dialing backend"):
        copy.refresh()
    assert same(copy, there)
    assert copy.cancel() is None


def test_logs_of_some_hosts_are_asked_of_their_pods_alone(copy: Mirror, cluster: Cluster) -> None:
    cluster.lines = [b"2026-01-01T00:00:00Z [host attempt 1 rank 3] a line"]
    copy.fetch_logs(["node-of-job-a-worker"])
    assert cluster.read == ["job-a-worker"]
    copy.fetch_logs(["a-node-that-is-gone"])
    assert sorted(cluster.read[1:]) == ["job-a-worker", "job-master"]


def test_files_of_a_config_map_may_be_packed() -> None:
    packed = {"data": {"a": "text"}, "binaryData": {"b.gz": "AAE="}}
    assert contents(json.loads(json.dumps(packed))) == {"a": b"text", "b.gz": b"\x00\x01"}
    assert contents({}) == {}
