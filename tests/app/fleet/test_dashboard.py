"""What the screen with keys reads and does, on real run directories."""

import json
import os
import threading
from pathlib import Path

import pytest
from msgspec.structs import replace

from orchestrator.app.fleet.dashboard import JobServices
from orchestrator.app.fleet.known_jobs import Scope
from orchestrator.backends.kubernetes.mirror.mirror_paths import REMOTE, folder_of
from orchestrator.contract.files.run_dir import RunDir
from orchestrator.contract.spec.kubernetes_spec import KubernetesSpec
from orchestrator.dashboard.interactive.content import Source
from orchestrator.dashboard.interactive.feed import KEPT, Feed, Feeds
from orchestrator.errors import JobError
from orchestrator.job.stage import ENDED
from orchestrator.journal.journal import to_line
from orchestrator.journal.snapshot import replay
from tests.dashboard.dashboard_story import (
    START,
    StoryClock,
    broken,
    finished,
    journal,
    submitted,
)


def write(run_dir: RunDir, events: list) -> None:  # type: ignore[type-arg]
    run_dir.path.mkdir(parents=True, exist_ok=True)
    run_dir.journal.write_bytes(b"".join(map(to_line, journal(events))))


@pytest.fixture
def services(tmp_path: Path) -> JobServices:
    write(RunDir(tmp_path / "runs" / "a"), finished())
    write(RunDir(tmp_path / "runs" / "b"), broken())
    environ = {"XDG_STATE_HOME": str(tmp_path / "state"), "PATH": os.environ["PATH"]}
    scope = Scope(run_root=str(tmp_path / "runs"))
    return JobServices(scope, environ, StoryClock(START + 90))


def test_the_fleet_is_that_of_list_and_opens_its_jobs(
    services: JobServices, tmp_path: Path
) -> None:
    rows = services.fleet().rows
    assert {row.name: row.state for row in rows} == {"a": "SUCCEEDED", "b": "FAILED"}
    read = services.open_job(rows[-1].run_dir)
    content = read()
    assert (content.view.state, content.view.saved_steps) == ("SUCCEEDED", (20, 40, 60))
    assert content.view.time is not None
    with pytest.raises(JobError, match="cannot be read from here"):
        services.open_job(str(tmp_path / "elsewhere"))


def test_a_machine_without_the_kubeconfig_of_a_job_shows_all_other_jobs(
    services: JobServices, tmp_path: Path
) -> None:
    folder = folder_of(tmp_path / "runs", "prod", "team", "far")
    on_pods = submitted(
        backend="kubernetes", launch=replace(submitted().launch, kubernetes=KubernetesSpec())
    )
    write(RunDir(folder), [on_pods, *broken()[1:]])
    of_the_cluster = {"context": "prod", "namespace": "team", "kind": "pytorchjob", "job": "far"}
    kept = {"run_dir": "/runs/far", "python": "python3", "launch": 1}
    (folder / REMOTE).write_text(json.dumps({**of_the_cluster, **kept}))
    environ = {**services.environ, "KUBECONFIG": str(tmp_path / "none")}
    content = JobServices(services.scope, environ, services.clock).fleet()
    assert {row.name for row in content.rows} == {"a", "b", "far"}
    (warning,) = content.warnings
    assert "cannot find a Kubernetes cluster" in warning


def test_a_job_is_read_again_only_from_where_the_last_read_ended(
    services: JobServices, tmp_path: Path
) -> None:
    run_dir = RunDir(tmp_path / "runs" / "b")
    services.fleet()
    read = services.open_job(str(run_dir.path))
    first = read()
    assert first.view.checkpoint.step == 20
    more = journal(finished())[len(broken()) :]
    with run_dir.journal.open("ab") as file:
        file.writelines(map(to_line, more))
    second = read()
    assert second.view.state == "SUCCEEDED"
    assert second.view.saved_steps == (20, 40, 60)


def test_logs_are_those_of_the_newest_attempt_in_order_of_time(
    services: JobServices, tmp_path: Path
) -> None:
    run_dir = RunDir(tmp_path / "runs" / "a")
    services.fleet()
    folder = run_dir.logs / "attempt-2" / "host-0"
    folder.mkdir(parents=True)
    (folder / "rank-0.log").write_text("2023-11-14 22:13:05 second\nmore of it\n")
    (folder / "rank-1.log").write_text("2023-11-14 22:13:04 first\n")
    read = services.open_logs(str(run_dir.path), "host-0", None)
    assert [line.split("] ")[1] for line in read().lines] == [
        "2023-11-14 22:13:04 first",
        "2023-11-14 22:13:05 second",
        "more of it",
    ]
    with (folder / "rank-1.log").open("a") as file:
        file.write("half a ")
        file.flush()
        assert len(read().lines) == 3
        file.write("line\n")
    assert read().lines[-1] == "[host-0 rank 1] half a line"
    alone = services.open_logs(str(run_dir.path), "host-0", 1)
    assert alone().lines == ("2023-11-14 22:13:04 first", "half a line")


def test_an_unfinished_submission_is_said(services: JobServices, tmp_path: Path) -> None:
    services.fleet()
    (tmp_path / "runs" / "a" / "journal.jsonl").write_bytes(b"")
    with pytest.raises(JobError, match="submission of job a has not finished"):
        services.open_job(str(tmp_path / "runs" / "a"))()


def test_events_are_those_of_the_command(services: JobServices, tmp_path: Path) -> None:
    services.fleet()
    read = services.open_events(str(tmp_path / "runs" / "b"))
    assert "rank 1 on host-0 was killed by SIGKILL" in read().lines[-1]


def test_cancel_and_stacks_are_the_use_cases_of_their_commands(
    services: JobServices, tmp_path: Path
) -> None:
    services.fleet()
    job = str(tmp_path / "runs" / "b")
    with pytest.raises(JobError, match="is not running: SUCCEEDED"):
        services.stacks(str(tmp_path / "runs" / "a"))
    assert "cancelled without a leader" in services.cancel(job)
    assert replay(RunDir(Path(job))).state in ENDED


def test_a_source_is_read_by_one_thread_and_only_while_its_page_is_shown(
    services: JobServices, tmp_path: Path
) -> None:
    fresh = threading.Event()
    feeds = Feeds(services, fresh.set, StoryClock())
    fleet = Source("fleet")
    feeds.show((fleet,))
    assert fresh.wait(20)
    assert feeds.readings()[fleet].content is not None
    job = Source("job", str(tmp_path / "runs" / "a"))
    fresh.clear()
    feeds.show((job,))
    assert fresh.wait(20)
    lost = Source("job", "/nowhere")
    fresh.clear()
    feeds.show((lost,))
    assert fresh.wait(20)
    assert "cannot be read from here" in feeds.readings()[lost].problem
    for number in range(2 * KEPT):
        feeds.show((Source("stacks", str(number)),))
    assert len(feeds.readings()) == KEPT
    feeds.show(())


def test_a_read_that_hangs_has_one_thread_however_often_its_page_is_opened() -> None:
    """And when it ends, its page is kept fresh again."""
    back, begun, fresh, reads = threading.Event(), threading.Event(), threading.Event(), list[int]()

    def read() -> None:
        reads.append(1)
        begun.set()
        back.wait(60)

    feed = Feed(lambda: read, 0.001, fresh.set, StoryClock())
    feed.start()
    assert begun.wait(60)
    before = threading.active_count()
    for _ in range(20):
        feed.stop()
        feed.start()
    assert (threading.active_count(), reads) == (before, [1])
    back.set()
    for _ in range(3):
        fresh.clear()
        assert fresh.wait(60)
    feed.stop()


def test_an_error_of_any_kind_is_said_on_the_screen() -> None:
    fresh = threading.Event()

    def read() -> None:
        raise RecursionError("nested too deep")

    feed = Feed(lambda: read, None, fresh.set, StoryClock())
    feed.start()
    assert fresh.wait(60)
    assert feed.reading.problem == "nested too deep"
