"""The progress of a TrainJob, posted to a real HTTPS server."""

import json
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from orchestrator.backends.kubernetes.leader.trainer_status import (
    CA,
    TOKEN,
    URL,
    TrainerServer,
    status_body,
)
from orchestrator.errors import BackendError, Unanswered
from orchestrator.job.reports.job_report import JobReport
from orchestrator.job.reports.last_steps import Pace, pace_of_last
from tests.backends.kubernetes.status_server import StatusServer, status_server

REPORT = JobReport(
    launch=1,
    state="RUNNING",
    message="attempt 2 trains",
    step=823,
    steps=5000,
    attempt=2,
    updated=1795456109.4,
    loss=1.78652,
)
PACE = Pace(attempt=2, step=823, loss=1.78652, tokens_per_second=2941.0, step_s=0.25)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[StatusServer]:
    with status_server(tmp_path) as found:
        yield found


def client(server: StatusServer) -> TrainerServer:
    made = TrainerServer.from_mapping(server.environ)
    assert made is not None
    return made


def test_progress_is_posted_and_the_token_is_read_each_time(server: StatusServer) -> None:
    client(server).post(status_body(REPORT, PACE))
    server.token.write_text("renewed")
    client(server).post(status_body(replace(REPORT, step=5000, state="SUCCEEDED"), PACE))
    first, last = (one["trainerStatus"] for one in server.taken)
    assert first == {
        "progressPercentage": 16,
        "lastUpdatedTime": "2026-11-23T17:48:29Z",
        "metrics": [
            {"name": "step", "value": "823"},
            {"name": "attempt", "value": "2"},
            {"name": "loss", "value": "1.78652"},
            {"name": "tokens_per_second", "value": "2941"},
        ],
        "estimatedRemainingSeconds": 1044,
    }
    assert (last["progressPercentage"], last["estimatedRemainingSeconds"]) == (100, 0)


@pytest.mark.parametrize(
    ("report", "pace"),
    [
        (replace(REPORT, state="RECOVERING", loss=None), PACE),
        (replace(REPORT, step=0, loss=None), None),
        (replace(REPORT, steps=2**40), replace(PACE, step_s=1e6)),
        (replace(REPORT, loss=-1.23456789e-300), PACE),
    ],
)
def test_every_post_fits_the_schema(
    server: StatusServer, report: JobReport, pace: Pace | None
) -> None:
    client(server).post(status_body(report, pace))
    status = server.taken[0]["trainerStatus"]
    assert ("estimatedRemainingSeconds" in status) == (
        pace is not None and report.state == "RUNNING"
    )


@pytest.mark.parametrize(
    "wrong",
    [
        {"progressPercentage": 16.5},
        {"progressPercentage": "16"},
        {"progress": 16},
        {"estimatedRemainingSeconds": -1},
        {"lastUpdatedTime": "yesterday"},
        {"metrics": [{"name": "loss", "value": 1.5}]},
        {"metrics": [{"name": "loss"}]},
    ],
)
def test_the_server_refuses_what_the_api_does_not_have(
    server: StatusServer, wrong: dict[str, Any]
) -> None:
    """So the posts of the other tests are checked."""
    body = status_body(REPORT, PACE)
    body["trainerStatus"] |= wrong
    with pytest.raises(BackendError, match="rejects it with 422"):
        client(server).post(body)
    assert server.taken == []


def test_a_job_with_steps_left_is_never_at_100_percent() -> None:
    nearly = status_body(replace(REPORT, step=4999), PACE)["trainerStatus"]
    assert nearly["progressPercentage"] == 99


def test_more_steps_than_the_job_has_are_100_percent_and_no_time_left(server: StatusServer) -> None:
    """A resume with fewer steps than the checkpoint has. The CRD refuses negative seconds."""
    client(server).post(status_body(replace(REPORT, step=6000), PACE))
    status = server.taken[0]["trainerStatus"]
    assert (status["progressPercentage"], status["estimatedRemainingSeconds"]) == (100, 0)


def test_an_own_program_has_no_percents_and_no_time_left(server: StatusServer) -> None:
    """How many steps it does is unknown; 0 % would be a false fact."""
    for state in ("RUNNING", "FAILED"):
        client(server).post(status_body(replace(REPORT, steps=0, state=state), PACE))
        assert server.taken[-1]["trainerStatus"].keys() == {"lastUpdatedTime", "metrics"}


def test_a_refusal_quotes_the_server_and_an_unreachable_server_is_retried(
    server: StatusServer,
) -> None:
    server.answers = 403
    with pytest.raises(BackendError, match=r"rejects it with 403: .*no: 403") as refused:
        client(server).post(status_body(REPORT, PACE))
    assert not isinstance(refused.value, Unanswered)
    server.answers = 500
    with pytest.raises(Unanswered, match="answers 500"):
        client(server).post(status_body(REPORT, PACE))
    server.url = "https://127.0.0.1:9/x"
    with pytest.raises(OSError, match="refused"):
        client(server).post(status_body(REPORT, PACE))


def test_no_other_server_gets_the_token(server: StatusServer, tmp_path: Path) -> None:
    """The certificate of the server must be signed by the operator's CA."""
    other = tmp_path / "other.crt"
    words = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 1 -subj /CN=x"
    more = ("-keyout", str(tmp_path / "other.pem"), "-out", str(other))
    subprocess.run(["openssl", *words.split(), *more], check=True, capture_output=True)
    with pytest.raises(ssl.SSLCertVerificationError):
        TrainerServer(server.url, other, server.token).post(status_body(REPORT, PACE))
    assert server.taken == []


@pytest.mark.parametrize("missing", [URL, CA, TOKEN])
def test_an_operator_without_the_feature_gate_gets_no_progress(missing: str) -> None:
    environ = {URL: "https://trainer", CA: "/ca", TOKEN: "/token"}
    assert TrainerServer.from_mapping(environ) is not None
    assert TrainerServer.from_mapping({**environ, missing: ""}) is None


# Training speed


def lines(*bodies: dict[str, Any]) -> bytes:
    return b"".join(json.dumps(one).encode() + b"\n" for one in bodies)


def test_the_speed_is_measured_over_the_last_steps_of_the_current_attempt(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert pace_of_last(path) is None
    path.write_bytes(b"")
    assert pace_of_last(path) is None
    old = [{"attempt": 1, "step": at, "loss": 9.0, "time": 10.0 * at} for at in range(1, 2000)]
    new = [
        {"attempt": 2, "step": at, "loss": 3.0, "tokens_per_second": 7.0, "time": 90000 + 0.5 * at}
        for at in range(1800, 1820)
    ]
    path.write_bytes(lines(*old, *new) + b'{"attempt": 2, "step": 1820, "lo')
    pace = pace_of_last(path)
    assert pace == Pace(attempt=2, step=1819, loss=3.0, tokens_per_second=7.0, step_s=0.5)


def test_lines_that_are_no_metrics_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\nnothing\n' + lines({"attempt": 1, "step": 2, "loss": None}))
    assert pace_of_last(path) == Pace(attempt=1, step=2)
