"""What happened in a job as spans: which there are, and what a collector gets."""

import asyncio
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

from orchestrator.contract.files.run_dir import RunDir
from orchestrator.contract.messages.events import Event, JobSubmitted, LeaderStarted
from orchestrator.job.state import Run
from orchestrator.job.transitions import fold
from orchestrator.journal.journal import to_line
from orchestrator.notify import span_exporter
from orchestrator.notify.span_exporter import SpanExporter, collector_of, exporting, is_wanted
from orchestrator.notify.spans import Span, Trace, trace_of
from tests.dashboard.dashboard_story import START, finished, journal, recovered, restarting
from tests.e2e.job import Ndctl, assert_nothing_left
from tests.notify.collector import Collector, attributes_of, collecting
from tests.notify.receivers import until

RUN_DIR = Path("/runs/quickstart")


def spans(events: Sequence[Event]) -> dict[str, Span]:
    return {span.key: span for span in traced(events).spans}


def traced(events: Sequence[Event]) -> Trace:
    return trace_of(RUN_DIR, journal(events), fold(events))


def times(span: Span) -> tuple[float, float]:
    return span.start - START, span.end - START


def test_a_job_with_an_incident_is_a_trace_of_attempts_and_lost_time() -> None:
    found = spans(finished())
    assert {key: (span.parent, *times(span)) for key, span in found.items()} == {
        "job-1": (None, 0.0, 82.0),
        "attempt-1": ("job-1", 2.0, 32.0),
        "attempt-2": ("job-1", 32.0, 82.0),
        "incident-1": ("attempt-1", 30.0, 37.0),
        "incident-1-detection": ("incident-1", 30.0, 30.0 + found_after(found)),
        "incident-1-restart": ("incident-1", 30.0 + found_after(found), 37.0),
        "incident-1-lost_work": ("incident-1", 25.0, 30.0),
    }
    told = found["incident-1"].attributes
    assert (told["job_name"], told["run_root"]) == ("quickstart", "/runs")
    assert (told["ndctl_checkpoint_step"], told["scope"]) == (20, "rank")
    assert found["incident-1"].error == found["attempt-1"].error
    assert found["attempt-2"].error is found["job-1"].error is None
    assert found["job-1"].attributes["ndctl_restarts_total"] == 1


def found_after(found: dict[str, Span]) -> float:
    span = found["incident-1-detection"]
    assert span.end - span.start < 1.0
    return span.end - span.start


def test_a_span_appears_once_it_has_ended() -> None:
    assert spans(restarting()).keys() == {"attempt-1"}
    assert spans(recovered()).keys() == {
        *("attempt-1", "incident-1"),
        *(f"incident-1-{cause}" for cause in ("detection", "restart", "lost_work")),
    }


def test_a_resumed_job_goes_on_with_the_trace_and_tells_nothing_twice() -> None:
    before, first = spans(finished()), finished()[0]
    assert isinstance(first, JobSubmitted)
    again = replace(first, at=START + 500, resume=True, launch=replace(first.launch, launch=2))
    resumed = [*finished(), again, LeaderStarted(at=START + 501, host="host-0", pid=9)]
    assert spans(resumed) == {}
    assert traced(resumed).id == traced(finished()).id
    assert traced(resumed).span_id("job-1") == traced(finished()).span_id("job-1")
    assert len({traced(finished()).span_id(key) for key in before}) == len(before)


class Stage:
    """A job whose journal grows, and an exporter that watches it."""

    def __init__(self, folder: Path, collector: Collector, environ: dict[str, str]) -> None:
        self.run_dir, self.run = RunDir(folder / "quickstart"), Run()
        self.run_dir.path.mkdir(exist_ok=True)
        client = collector_of(environ)
        assert client is not None
        self.exporter = SpanExporter(
            client, self.run_dir, lambda: self.run, environ, delays_s=(0.01,)
        )

    def reaches(self, events: Sequence[Event]) -> None:
        self.run_dir.journal.write_bytes(b"".join(map(to_line, journal(events))))
        self.run = fold(events)


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    with collecting() as found:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", found.url)
        monkeypatch.setattr(span_exporter, "LOOK_S", 0.01)
        yield found


def environ_of(collector: Collector, **more: str) -> dict[str, str]:
    return {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url, **more}


def test_a_collector_gets_each_span_once_with_its_parents(
    collector: Collector, tmp_path: Path
) -> None:
    stage = Stage(tmp_path, collector, environ_of(collector))

    async def lives() -> None:
        async with exporting(stage.exporter):
            stage.reaches(recovered())
            await until(lambda: len(collector.spans) == 5)
            stage.reaches(finished())
            await stage.exporter.finish()

    asyncio.run(lives())
    assert sorted(collector.names) == sorted(
        [
            *("job quickstart", "attempt 1", "attempt 2", "incident 1 rank-killed"),
            *("detection", "restart", "lost_work"),
        ]
    )
    assert set(collector.paths) == {"/v1/traces"}
    assert collector.resources[0]["service.name"] == "ndctl"
    job, attempt = collector.named("job quickstart"), collector.named("attempt 1")
    incident = collector.named("incident 1 rank-killed")
    assert len({span.trace_id for span in collector.spans}) == 1
    assert (attempt.parent_span_id, incident.parent_span_id) == (job.span_id, attempt.span_id)
    assert collector.named("restart").parent_span_id == incident.span_id
    assert incident.end_time_unix_nano == round((START + 37) * 1e9)
    assert (incident.status.code, job.status.code) == (2, 0)
    assert attributes_of(collector.named("lost_work"))["cause"] == "lost_work"


def test_two_looks_at_the_same_time_export_each_span_once(
    collector: Collector, tmp_path: Path
) -> None:
    stage = Stage(tmp_path, collector, environ_of(collector))
    stage.reaches(finished())

    async def looks() -> list[bool]:
        return await asyncio.gather(*(stage.exporter.look() for _ in range(3)))

    assert asyncio.run(looks()) == [True, True, True]
    assert len(collector.spans) == 7


def test_a_new_leader_exports_the_same_ids(collector: Collector, tmp_path: Path) -> None:
    for _ in range(2):
        stage = Stage(tmp_path, collector, environ_of(collector))
        stage.reaches(finished())
        asyncio.run(stage.exporter.finish())
    ids = [span.span_id for span in collector.spans]
    assert ids[: len(ids) // 2] == ids[len(ids) // 2 :]


def test_a_collector_that_refuses_is_asked_again_until_it_takes_the_spans(
    collector: Collector, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    collector.codes = [400, 404]
    stage = Stage(tmp_path, collector, environ_of(collector))
    stage.reaches(finished())
    asyncio.run(stage.exporter.finish())
    assert len(collector.paths) == 3
    assert len(collector.spans) == 7


def test_a_collector_that_is_gone_costs_the_end_of_a_job_a_limited_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://127.0.0.1:9/v1/traces")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "1")
    monkeypatch.setattr(span_exporter, "LAST_S", 0.3)
    stage = Stage(tmp_path, Collector(), {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "x"})
    stage.reaches(finished())
    asyncio.run(stage.exporter.finish())
    assert "the collector did not take the last spans of the job" in caplog.text
    # A client that still tries would log into the next test.
    for thread in threading.enumerate():
        if thread.name == "_export":
            thread.join()


def test_the_variables_of_opentelemetry_name_the_service_and_the_headers(
    collector: Collector, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = {
        "OTEL_SERVICE_NAME": "training",
        "OTEL_RESOURCE_ATTRIBUTES": "deployment.environment=prod",
        "OTEL_EXPORTER_OTLP_HEADERS": "x-key=s3cret",
        "OTEL_EXPORTER_OTLP_COMPRESSION": "gzip",
    }
    for name, value in more.items():
        monkeypatch.setenv(name, value)
    stage = Stage(tmp_path, collector, environ_of(collector, **more))
    stage.reaches(finished())
    asyncio.run(stage.exporter.finish())
    (resource,) = collector.resources
    assert resource["service.name"] == "training"
    assert resource["deployment.environment"] == "prod"
    assert {one["x-key"] for one in collector.headers} == {"s3cret"}


@pytest.mark.parametrize(
    ("more", "wanted"),
    [
        ({}, True),
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}, True),
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, False),
        ({"OTEL_SDK_DISABLED": "True"}, False),
        ({"OTEL_TRACES_EXPORTER": "none"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": ""}, False),
    ],
)
def test_the_environment_decides_whether_spans_are_exported(
    more: dict[str, str], wanted: bool
) -> None:
    assert is_wanted({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318", **more}) is wanted


def test_a_wrong_variable_is_named_and_the_job_runs_without_spans(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_PYTHON_EXPORTER_OTLP_HTTP_CREDENTIAL_PROVIDER", "missing")
    assert collector_of({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318"}) is None
    assert "no spans are exported: OpenTelemetry cannot be set up: " in caplog.text
    assert "missing" in caplog.text


@pytest.mark.process
def test_a_job_exports_its_spans_before_it_releases_its_hosts(
    collector: Collector, tmp_path: Path
) -> None:
    """A program that fails in attempt 1 and succeeds in attempt 2, on the local backend."""
    program = tmp_path / "twice.sh"
    program.write_text("#!/bin/sh\n[ $NDCTL_ATTEMPT -gt 1 ]\n")
    program.chmod(0o755)
    ndctl = Ndctl(tmp_path / "runs")
    done = ndctl("run", "--name", "twice", "--follow", "--", "--no-python", str(program))
    assert done.code == 0, done.out
    assert {*collector.names} >= {"job twice", "attempt 1", "attempt 2", "detection"}
    job, failed = collector.named("job twice"), collector.named("attempt 1")
    assert failed.parent_span_id == job.span_id
    assert "exited with code 1" in failed.status.message
    assert attributes_of(job)["state"] == "SUCCEEDED"
    assert_nothing_left(tmp_path / "runs" / "twice")
