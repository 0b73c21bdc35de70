"""The mirror of a run directory: before the start, while it runs, and after its end."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from orchestrator.backends.kubernetes.api.api_errors import Forbidden
from orchestrator.backends.kubernetes.api.client import Listed
from orchestrator.backends.kubernetes.mirror import fetch
from orchestrator.backends.kubernetes.mirror.copied_files import with_last_metrics
from orchestrator.backends.kubernetes.mirror.fetch import main
from orchestrator.backends.kubernetes.mirror.mirror import Mirror, contents
from orchestrator.backends.kubernetes.observe.reports import stamp, to_data
from orchestrator.backends.kubernetes.resources import CONFIG_MAPS, EVENTS, Object, Resource
from orchestrator.contract.files.run_dir import RunDir
from orchestrator.contract.messages.actions import StopAttempt
from orchestrator.contract.messages.events import CancelRequested, Event, LeaderStarted, StepReached
from orchestrator.contract.submission_payload import Handover
from orchestrator.dashboard.job_view.replay import read_snapshot_state, read_state
from orchestrator.dashboard.snapshot import Snapshot, read_snapshot
from orchestrator.dashboard.status import status_json, status_text
from orchestrator.errors import BackendError, Unanswered, Unreachable
from orchestrator.job.reports.job_report import JobReport, read_report
from orchestrator.job.transitions import fold
from orchestrator.journal import snapshot
from orchestrator.journal.journal import Journal, Place, has_writer, read, to_line
from orchestrator.journal.supervisor import Folded, Supervisor
from orchestrator.seams import LaunchStatus
from tests.agent.world import TurnedClock
from tests.backends.handover import handover_of
from tests.backends.kubernetes.rendered import PLAIN, a_launch


@dataclass
class Cluster:
    """Pods of one job. `fetch` runs on a local run directory instead of in a pod."""

    there: RunDir
    pods: list[Object] = field(default_factory=list)
    lines: Sequence[bytes] = ()
    context: str = "prod"
    asked: list[str] = field(default_factory=list)
    silent: set[str] = field(default_factory=set)
    """Pods on unreachable nodes."""
    read: list[str] = field(default_factory=list)
    """Pods whose log was requested."""
    clock: TurnedClock = field(default_factory=TurnedClock)
    state: dict[str, str] | None = None
    """Report in the ConfigMap of the job."""
    events: list[Object] = field(default_factory=list)
    away: bool = False
    """The API server is unreachable."""
    busy: int = 0
    """Number of log requests that fail before one succeeds."""
    job: Object | None = None
    """The job object."""
    no_exec: bool = False
    """The user has no right to exec."""

    def get(self, resource: Resource, namespace: str, name: str) -> Object | None:
        assert (resource, namespace, name) == (CONFIG_MAPS, "team", "job-state")
        return None if self.state is None else {"data": self.state}

    def about(self, resource: Resource, namespace: str, name: str) -> Object | None:
        assert (resource.kind, namespace, name) == ("PyTorchJob", "team", "job")
        if self.away:
            raise Unreachable("the API server cannot be reached: refused")
        return self.job

    def list(
        self, resource: Resource, namespace: str, *, labels: str = "", fields: str = ""
    ) -> Listed:
        if self.away:
            raise Unreachable("the API server cannot be reached: refused")
        if resource == EVENTS:
            assert fields == "involvedObject.name=job"
            return Listed(items=tuple(self.events), version="1")
        return Listed(items=tuple(self.pods), version="1")

    def exec(
        self, namespace: str, pod: str, container: str, argv: Sequence[str], *, timeout_s: float
    ) -> tuple[int, bytes, bytes]:
        import io

        self.asked.append(pod)
        if self.no_exec:
            raise Forbidden("dev may not create pods/exec in namespace team", fix="ask for it")
        if pod in self.silent:
            raise Unanswered(f"pod {pod}: error dialing backend")
        if "cancel" in argv:
            return 0, b"is being cancelled\n", b""
        if "snapshot" in argv:
            assert argv[-4:] == [
                "snapshot",
                "job",
                "--json",
                f"--run-root={self.there.path.parent}",
            ]
            return 5, b"", b"error: no ranks run now\n"
        if "profile" in argv:
            return 0, " ".join(argv[argv.index("profile") : -1]).encode(), b""
        out = io.BytesIO()
        main([str(self.there.path), *argv[-2:]], out)
        return 0, out.getvalue(), b""

    def log(self, namespace: str, pod: str, container: str, **more: Any) -> Iterator[bytes]:
        self.read.append(pod)
        if self.busy > 0:
            self.busy -= 1
            raise Unanswered("the kubelet is busy")
        yield from self.lines


def a_pod(name: str, phase: str = "Running", *, ready: str = "True", **labels: str) -> Object:
    return {
        "metadata": {
            "name": name,
            "namespace": "team",
            "uid": f"uid-of-{name}",
            "labels": labels,
            "annotations": {"ndctl.dev/launch": "1"},
        },
        "spec": {"nodeName": f"node-of-{name}"},
        "status": {
            "phase": phase,
            "conditions": [{"type": "Ready", "status": ready}],
            "containerStatuses": [{"state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}}}],
        },
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
    made.keep()
    return made


def of(there: RunDir, launch: int = 1, *, resume: bool = False) -> Handover:
    plan = replace(a_launch(PLAIN, launch=launch), run_dir=str(there.path))
    return handover_of(plan, backend="kubernetes", resume=resume)


def happen(there: RunDir, *events: Event) -> None:
    with Journal(there.journal, TurnedClock()) as journal:
        supervisor = Supervisor(journal)
        for event in events:
            supervisor.feed(event)


END = (LeaderStarted(at=1.0, host="node-0", pid=1), CancelRequested(at=2.0, by="me"))


def same(copy: Mirror, there: RunDir) -> bool:
    return copy.run_dir.journal.read_bytes() == there.journal.read_bytes()


def test_one_refresh_fetches_a_long_journal_and_its_snapshot(
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
    assert read_snapshot_state(copy.run_dir)[1].place == place
    assert read_state(copy.run_dir).run.interruption.cancelled_by == "me"


def test_until_the_leader_starts_the_mirror_has_a_guess_and_the_spec(copy: Mirror) -> None:
    assert not copy.has_begun
    assert len(read(copy.run_dir.journal)) == 1
    assert copy.run_dir.spec.read_text() == "name: job\n"
    copy.refresh()  # pods run, but the journal does not exist yet
    assert not copy.has_begun
    here = copy.here(a_launch(PLAIN))
    assert here.kubernetes is not None
    assert (here.kubernetes.context, here.kubernetes.namespace) == ("prod", "team")


def test_new_lines_are_fetched_from_the_leaders_pod(
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


def test_the_local_lock_is_held_while_the_leader_writes_the_journal(
    copy: Mirror, there: RunDir
) -> None:
    with Journal(there.journal, TurnedClock()) as journal:
        journal.append(of(there).job)
        copy.refresh()
        assert has_writer(copy.run_dir.journal)
    copy.refresh()
    assert not has_writer(copy.run_dir.journal)


def test_a_resumed_launch_keeps_the_mirror_and_a_new_one_does_not(
    copy: Mirror, there: RunDir
) -> None:
    happen(there, of(there).job, *END)
    copy.refresh()
    copy.expect(of(there, 2, resume=True), "team")
    assert [entry.seq for entry in read(copy.run_dir.journal)] == [1, 2, 3, 4]
    copy.refresh()  # the files belong to the previous launch
    assert not copy.has_begun
    happen(there, of(there, 2, resume=True).job)
    copy.refresh()
    assert copy.has_begun
    assert same(copy, there)
    copy.run_dir.metrics.write_text('{"step":1}\n')
    copy.expect(of(there, 3), "team")
    copy.keep()
    assert len(read(copy.run_dir.journal)) == 1
    assert copy.run_dir.metrics.read_text() == ""


def contents_of(run_dir: RunDir) -> dict[str, bytes]:
    files = (path for path in run_dir.path.rglob("*") if path.is_file())
    return {str(path.relative_to(run_dir.path)): path.read_bytes() for path in files}


@pytest.mark.parametrize("resume", [False, True])
def test_a_launch_that_was_never_submitted_keeps_the_mirror(
    copy: Mirror, there: RunDir, resume: bool
) -> None:
    happen(there, of(there).job, *END)
    copy.refresh()
    copy.run_dir.metrics.write_text('{"step":1}\n')
    (copy.run_dir.logs / "rank.log").parent.mkdir(parents=True, exist_ok=True)
    (copy.run_dir.logs / "rank.log").write_text("step 1\n")
    before = contents_of(copy.run_dir)
    copy.expect(of(there, 2, resume=resume), "team")
    assert not copy.remote.settled
    copy.run_dir.submitted.write_text("{}")
    assert contents_of(copy.run_dir) != before
    copy.forget()
    assert contents_of(copy.run_dir) == before


def test_a_job_that_was_never_submitted_has_no_state(tmp_path: Path, cluster: Cluster) -> None:
    made = Mirror(tmp_path / "never", cluster)  # type: ignore[arg-type]
    made.expect(of(cluster.there), "team")
    assert made.run_dir.journal.exists()
    made.forget()
    assert not made.run_dir.path.exists()


def test_data_from_the_leader_proves_that_the_cluster_has_the_job(
    tmp_path: Path, cluster: Cluster, there: RunDir
) -> None:
    """The submitting command was killed before it could record the submission."""
    made = Mirror(tmp_path / "cut-off", cluster)  # type: ignore[arg-type]
    made.expect(of(there), "team")
    assert not made.remote.settled
    happen(there, of(there).job)
    made.refresh()
    assert made.remote.settled


def test_a_journal_that_restarts_on_the_volume_restarts_in_the_mirror(
    copy: Mirror, there: RunDir
) -> None:
    happen(there, of(there).job, *END)
    copy.refresh()
    there.journal.unlink()
    happen(there, of(there).job, END[0])
    copy.refresh()
    copy.refresh()
    assert same(copy, there)


def test_without_a_running_pod_the_end_of_the_leaders_log_is_used(
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


def test_metrics_that_were_copied_stay_when_the_pods_are_gone(
    copy: Mirror, there: RunDir, cluster: Cluster
) -> None:
    """The log of the leader has the first line and the last ones."""
    happen(there, of(there).job, END[0])
    lines = [b'{"step":%d}\n' % step for step in range(1, 10)]
    there.metrics.write_bytes(b"".join(lines[:6]))
    copy.refresh()
    happen(there, END[1])
    cluster.pods, cluster.no_exec = [a_pod("job-master", "Succeeded", **LEADER)], True
    told = [lines[0], *lines[4:]]
    cluster.lines = [*last_words(there, 1), *(b"ndctl-metrics: " + one.rstrip() for one in told)]
    copy.refresh()
    assert copy.run_dir.metrics.read_bytes() == b"".join(lines)


@pytest.mark.parametrize(
    ("known", "told", "found"),
    [
        (b"", b"1\n7\n8\n", b"1\n7\n8\n"),
        (b"1\n2\n", b"1\n7\n8\n", b"1\n2\n7\n8\n"),
        (b"5\n6\n7\n", b"1\n7\n8\n", b"5\n6\n7\n8\n"),
        (b"1\n2\n3\n", b"1\n2\n3\n", b"1\n2\n3\n"),
        (b"of another run\n", b"1\n7\n", b"1\n7\n"),
        (b"1\n", b"1\n", b"1\n"),
        (b"1\n2\n", b"", b"1\n2\n"),
    ],
)
def test_last_metrics_follow_the_copied_ones(known: bytes, told: bytes, found: bytes) -> None:
    assert with_last_metrics(known, told) == found


def last_words(there: RunDir, since: int) -> list[bytes]:
    return [b"ndctl-journal: " + one for one in there.journal.read_bytes().splitlines()[since:]]


def test_the_last_lines_of_a_long_journal_follow_those_already_seen(
    copy: Mirror, there: RunDir, cluster: Cluster
) -> None:
    happen(there, of(there).job, END[0])
    copy.refresh()
    happen(there, END[1])
    cluster.pods, cluster.no_exec = [a_pod("job-master", "Succeeded", **LEADER)], True
    cluster.lines = last_words(there, 1)
    copy.refresh()
    assert same(copy, there)


def test_missing_lines_are_not_invented(copy: Mirror, there: RunDir, cluster: Cluster) -> None:
    happen(there, of(there).job, *END)
    cluster.pods = [a_pod("job-master", "Succeeded", **LEADER)]
    cluster.lines = last_words(there, 2)
    before = copy.run_dir.journal.read_bytes()
    with pytest.raises(BackendError, match="holds only the last lines") as failed:
        copy.refresh()
    assert str(there.journal) in str(failed.value.fix)
    assert copy.run_dir.journal.read_bytes() == before
    assert not copy.has_begun


def test_only_the_leaders_log_of_many_ended_pods_is_read_and_once(
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


def test_another_pod_is_asked_while_the_leaders_node_is_dead(
    copy: Mirror, there: RunDir, cluster: Cluster
) -> None:
    happen(there, of(there).job, *END)
    cluster.silent = {"job-master"}
    copy.refresh()
    assert same(copy, there)
    assert cluster.asked == ["job-master", "job-a-worker"]
    copy.refresh()
    assert cluster.asked[2:] == ["job-a-worker"], "the pod that answered must be asked first"
    done = copy.cancel("ann")
    assert done is not None
    assert done.out == "is being cancelled"
    assert cluster.asked[-2:] == ["job-master", "job-a-worker"]
    done = copy.snapshot()
    assert done is not None
    assert (done.code, done.err) == (5, "error: no ranks run now")
    done = copy.profile((0, 5), 2, 9.0)
    assert done is not None
    assert done.out == "profile job --ranks 0,5 --steps 2 --timeout 9 --json"


def test_without_the_right_to_exec_a_job_is_cancelled_another_way(
    copy: Mirror, cluster: Cluster
) -> None:
    cluster.no_exec = True
    assert copy.cancel("ann") is None, "the caller must suspend the job instead"


def test_pods_that_are_not_ready_are_asked_last(
    copy: Mirror, there: RunDir, cluster: Cluster
) -> None:
    happen(there, of(there).job)
    cluster.pods[1] = a_pod("job-master", ready="Unknown", **LEADER)
    copy.refresh()
    assert cluster.asked == ["job-a-worker"]


def test_if_no_pod_answers_the_mirror_stays_and_cancel_finds_no_pod(
    copy: Mirror, there: RunDir, cluster: Cluster
) -> None:
    happen(there, of(there).job)
    copy.refresh()
    cluster.silent = {"job-master", "job-a-worker"}
    with pytest.raises(Unanswered, match="error dialing backend"):
        copy.refresh()
    assert same(copy, there)
    assert copy.cancel("ann") is None


def test_logs_of_some_hosts_are_read_from_their_pods_alone(copy: Mirror, cluster: Cluster) -> None:
    cluster.lines = [b"2026-01-01T00:00:00Z [host attempt 1 rank 3] a line"]
    copy.fetch_logs(["node-of-job-a-worker"])
    assert cluster.read == ["job-a-worker"]
    copy.fetch_logs(["a-node-that-is-gone"])
    assert sorted(cluster.read[1:]) == ["job-a-worker", "job-master"]


def test_a_log_that_cannot_be_read_is_tried_again_and_then_named(
    copy: Mirror, cluster: Cluster
) -> None:
    cluster.lines = [b"2026-01-01T00:00:00Z [host attempt 1 rank 3] a line"]
    cluster.busy = 2
    assert copy.fetch_logs(["node-of-job-a-worker"]) == []
    assert cluster.read == ["job-a-worker"] * 3
    cluster.busy = 100
    (said,) = copy.fetch_logs(["node-of-job-a-worker"])
    assert said == "the log of pod job-a-worker could not be read completely: the kubelet is busy"


def test_files_of_a_config_map_may_be_compressed() -> None:
    packed = {"data": {"a": "text"}, "binaryData": {"b.gz": "AAE="}}
    assert contents(json.loads(json.dumps(packed))) == {"a": b"text", "b.gz": b"\x00\x01"}
    assert contents({}) == {}


# State without a reachable pod


def shown(copy: Mirror, cluster: Cluster, status: LaunchStatus | None = None) -> Snapshot:
    found = read_snapshot(copy.run_dir, cluster.clock.now())
    assert found is not None
    return replace(found, launch_status=status)


def told(cluster: Cluster, **more: Any) -> dict[str, str]:
    at = cluster.clock.now()
    report = JobReport(
        launch=1, state="RUNNING", message="trains", step=823, steps=5000, attempt=2, updated=at
    )
    return to_data(replace(report, **more))


def test_the_time_of_the_last_contact_is_kept_and_the_lock_is_released(
    copy: Mirror, there: RunDir, cluster: Cluster
) -> None:
    with Journal(there.journal, TurnedClock()) as journal:
        journal.append(of(there).job)
        copy.refresh()
    heard_at = cluster.clock.now()
    assert copy.led_at == heard_at
    cluster.clock.sleep(100.0)
    cluster.away, cluster.silent = True, {"job-master", "job-a-worker"}
    with pytest.raises(Unreachable):
        copy.refresh()
    assert isinstance(copy.stale, Unreachable)
    assert not has_writer(copy.run_dir.journal), "the state of the leader is unknown"
    assert copy.led_at == heard_at


def test_a_leader_being_deleted_is_read_to_its_end_but_not_counted_as_running(
    copy: Mirror, there: RunDir, cluster: Cluster
) -> None:
    for pod in cluster.pods:
        pod["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    with Journal(there.journal, TurnedClock()) as journal:
        journal.append(of(there).job)
        copy.refresh()
        assert same(copy, there)
        assert not has_writer(copy.run_dir.journal)


def test_the_deletion_of_a_job_that_a_finalizer_holds_is_said(
    copy: Mirror, cluster: Cluster
) -> None:
    """Its leader trains on."""
    assert copy.deletion() == ""
    cluster.job = {"metadata": {"name": "job", "finalizers": ["example.org/hold"]}}
    assert copy.deletion() == ""
    cluster.job["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert copy.deletion() == (
        "PyTorchJob team/job was deleted at 2026-01-01T00:00:00Z; it and its pods stay until its"
        " finalizers are removed: example.org/hold"
    )
    cluster.away = True
    assert copy.deletion() == ""


def test_without_the_right_to_exec_the_state_is_read_from_the_config_map(
    copy: Mirror, cluster: Cluster
) -> None:
    cluster.no_exec, cluster.state = True, told(cluster, checkpoint=800)
    cluster.clock.sleep(30.0)
    with pytest.raises(Forbidden):
        copy.refresh()
    runs = LaunchStatus("2 of 2 pods run", held=True, unknown="dev may not create pods/exec")
    seen = shown(copy, cluster, runs)
    standing = seen.standing
    assert (standing.state, standing.as_of) == ("RUNNING", cluster.clock.now() - 30.0)
    assert (seen.view.step, seen.seen.checkpoint.name) == (823, "step-800")
    assert (seen.view.attempt, status_json(seen)["attempt"]) == (2, 2)
    assert "attempt 2" in status_text(seen, None)


def test_an_old_report_adds_nothing_to_the_journal(
    copy: Mirror, there: RunDir, cluster: Cluster
) -> None:
    cluster.state = told(cluster, updated=1.0)
    happen(there, of(there).job, *END)
    copy.refresh()
    assert shown(copy, cluster).standing.state == "CANCELLED"
    copy.run_dir.journal.write_bytes(b"")
    copy.expect(of(there, 2), "team")
    cluster.pods, cluster.state = [], told(cluster)
    copy.refresh()
    assert read_report(copy.run_dir) is None, "the report belongs to the previous launch"


def test_step_and_checkpoint_are_read_from_the_output_of_ranks(
    copy: Mirror, cluster: Cluster
) -> None:
    """The pods are being deleted and their node is unreachable."""
    cluster.silent = {"job-master", "job-a-worker"}
    line = "2026-11-23 17:06:06,329 step 529/5000 loss 1.7865 grad_norm 0.8"
    cluster.lines = [
        f"2026-11-23T17:06:06.5Z [node-1 attempt 1 rank 0] {line}".encode(),
        b"2026-11-23T17:06:07.1Z [node-1 attempt 1 rank 2] checkpoint of step 529 is complete: x",
        b"2026-11-23T17:06:07.2Z [node-1 attempt 1 rank 1] step 900/5000 loss 1.0",
        b"2026-11-23T17:06:07.3Z leaving with 0",
    ]
    with pytest.raises(Unanswered):
        copy.refresh()
    gone = LaunchStatus("it was deleted", held=False, over="CANCELLED")
    seen = shown(copy, cluster, gone)
    assert seen.standing.state == "CANCELLED"
    assert (seen.view.step, seen.view.loss) == (529, 1.7865)
    assert seen.seen.checkpoint.name == "step-529"


def test_config_map_and_log_never_make_a_training_job_look_pending(
    copy: Mirror, cluster: Cluster
) -> None:
    """The local mirror only has the assumptions of the submitter."""
    cluster.no_exec, cluster.state = True, told(cluster, checkpoint=800, culprit="rank 3 on node2")
    at = stamp(cluster.clock.now() + 7.0)
    cluster.lines = [f"{at} [node-1 attempt 2 rank 0] x step 830/5000 loss 1.5 x".encode()]
    cluster.clock.sleep(10.0)
    with pytest.raises(Forbidden):
        copy.refresh()
    report = read_report(copy.run_dir)
    assert report is not None
    assert (report.state, report.step, report.checkpoint) == ("RUNNING", 830, 800)
    assert (report.culprit, report.attempt) == ("rank 3 on node2", 2)


def test_the_last_event_of_a_job_is_kept_after_its_deletion(copy: Mirror, cluster: Cluster) -> None:
    cluster.pods = []
    data = told(cluster, state="SUCCEEDED", message="all steps are done", step=5000)
    about = {"involvedObject": {"name": "job"}, "lastTimestamp": "2026-01-01T00:00:00Z"}
    bad = {"annotations": {"ndctl.dev/report": "{"}}
    cluster.events = [
        {**about, "metadata": bad},
        {**about, "metadata": {"annotations": {"ndctl.dev/report": json.dumps(data)}}},
    ]
    copy.refresh()
    standing = shown(copy, cluster).standing
    assert (standing.state, standing.reason) == ("SUCCEEDED", "all steps are done")


def test_a_known_end_is_shown_while_the_cluster_is_unreachable(
    copy: Mirror, there: RunDir, cluster: Cluster
) -> None:
    happen(there, of(there).job, END[0])
    copy.refresh()
    cluster.clock.sleep(10.0)
    copy.remember("CANCELLED", "it was deleted")
    away = LaunchStatus("PyTorchJob job", held=True, unknown="the API server cannot be reached")
    standing = shown(copy, cluster, away).standing
    assert (standing.state, standing.reason) == ("CANCELLED", "it was deleted")
    happen(there, END[1])
    copy.refresh()
    assert "by me" in shown(copy, cluster, away).standing.reason, "the journal has the newer state"


# The spec of the running launch


STEP = StepReached(at=3.0, attempt=1, step=1, loss=None, tokens_per_second=None)


def specs(copy: Mirror, *launches: int) -> list[str]:
    return [copy.run_dir.spec_of(number).read_text() for number in launches]


def test_a_refused_launch_keeps_the_former_spec(copy: Mirror, there: RunDir) -> None:
    happen(there, of(there).job, END[0], STEP, END[1])
    copy.refresh()
    other = replace(of(there, 2, resume=True), spec="name: job # other\n")
    copy.expect(other, "team")
    assert copy.run_dir.spec.read_text() == "name: job\n"
    happen(there, other.job, END[0])
    copy.refresh()
    assert copy.run_dir.spec.read_text() == "name: job\n", "the new launch has not trained yet"
    assert specs(copy, 1, 2) == ["name: job\n", "name: job # other\n"]
    happen(there, STEP)
    copy.refresh()
    assert copy.run_dir.spec.read_text() == "name: job # other\n"


def test_the_mirror_knows_that_ranks_are_stopping(
    copy: Mirror, there: RunDir, cluster: Cluster
) -> None:
    happen(there, of(there).job)
    copy.refresh()
    assert not copy.stopping
    with Journal(there.journal, TurnedClock()) as journal:
        journal.append(END[1], [StopAttempt(attempt=1, grace_s=1.0, reason="cancelled")])
    copy.refresh()
    assert copy.stopping
