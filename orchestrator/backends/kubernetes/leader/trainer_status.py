"""Reports progress to `status.trainerStatus` of a TrainJob (Kubeflow Trainer 2.2 and later).

With feature gate TrainJobStatus the operator gives pods the address of a server, a CA and a token.
The leader posts an `UpdateTrainJobStatusRequest` to this server.
"""

import http.client
import json
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

from msgspec import Struct

from orchestrator.backends.kubernetes.observe.reports import stamp
from orchestrator.errors import BackendError, Unanswered
from orchestrator.job.reports.job_report import JobReport
from orchestrator.job.reports.last_steps import Pace

URL = "KUBEFLOW_TRAINER_SERVER_URL"
CA = "KUBEFLOW_TRAINER_SERVER_CA_CERT"
TOKEN = "KUBEFLOW_TRAINER_SERVER_TOKEN"
ANSWER_S = 10.0
MOST_SECONDS = 2**31 - 1
"""The fields are 32 bits wide."""


class TrainerServer(Struct, frozen=True):
    url: str
    ca: Path
    token: Path
    """CA and token are read for each request, because they are renewed within the hour."""

    @classmethod
    def from_mapping(cls, environ: Mapping[str, str]) -> Self | None:
        """None if the operator does not accept progress."""
        url, ca, token = (environ.get(name) for name in (URL, CA, TOKEN))
        # Older operators, or those without the feature gate, set none of these variables.
        if not (url and ca and token):
            return None
        return cls(url, Path(ca), Path(token))

    def post(self, body: Mapping[str, Any]) -> None:
        """Raises OSError if the server is unreachable, BackendError if it refuses."""
        place = urlsplit(self.url)
        try:
            connection = http.client.HTTPSConnection(
                place.hostname or "",
                place.port,
                timeout=ANSWER_S,
                context=ssl.create_default_context(cafile=str(self.ca)),
            )
            headers = {
                "Authorization": f"Bearer {self.token.read_text().strip()}",
                "Content-Type": "application/json",
            }
            try:
                connection.request("POST", place.path, json.dumps(body), headers)
                answer = connection.getresponse()
                said = answer.read().decode(errors="replace")
            finally:
                connection.close()
        # HTTPException is no OSError, so it would end the reporter's thread.
        except http.client.HTTPException as exc:
            raise Unanswered(f"{self.url} does not answer in HTTP: {exc!r}") from exc
        # The operator restarts or is overloaded: a retry may succeed, unlike after a rejection.
        if answer.status >= http.HTTPStatus.INTERNAL_SERVER_ERROR:
            raise Unanswered(f"{self.url} answers {answer.status}: {said[:300]}")
        if answer.status != http.HTTPStatus.OK:
            raise BackendError(
                f"{self.url} rejects it with {answer.status}: {said[:300]}",
                fix="the log of Kubeflow Trainer's controller shows why",
            )


def status_body(report: JobReport, pace: Pace | None) -> dict[str, Any]:
    """The body in the API's format: whole percents and seconds, metrics as text."""
    status: dict[str, Any] = {
        "lastUpdatedTime": stamp(report.updated),
        "metrics": [
            {"name": name, "value": value} for name, value in _metrics(report, pace).items()
        ],
    }
    # It is unknown how many steps a user's own program does.
    if report.steps:
        # Rounded down, so that only a job with all steps done shows 100.
        status["progressPercentage"] = min(100, 100 * report.step // report.steps)
    left = max(0, report.steps - report.step)
    # While ranks restart, no step time is known, and a guess would mislead.
    step_s = pace.step_s if pace is not None and report.steps else None
    if report.state == "RUNNING" and step_s is not None:
        status["estimatedRemainingSeconds"] = min(MOST_SECONDS, round(left * step_s))
    elif report.state == "SUCCEEDED":
        status["estimatedRemainingSeconds"] = 0
    return {"trainerStatus": status}


def _metrics(report: JobReport, pace: Pace | None) -> dict[str, str]:
    found = {"step": str(report.step), "attempt": str(report.attempt)}
    if report.loss is not None:
        found["loss"] = f"{report.loss:.6g}"
    if pace is not None and pace.tokens_per_second is not None and report.state == "RUNNING":
        found["tokens_per_second"] = f"{pace.tokens_per_second:.6g}"
    return found
