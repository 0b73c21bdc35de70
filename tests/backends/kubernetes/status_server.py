"""A status server with the checks of Kubeflow Trainer: kubeflow/trainer v2.2.0, pkg/statusserver;
the models that Kubeflow generates from its API (`kubeflow-trainer-api`); and the limits of
`status.trainerStatus` in the CRD, which those models do not have (commit 0015772c, after v2.2)."""

import contextlib
import http.server
import json
import re
import ssl
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orchestrator.backends.kubernetes.leader.trainer_status import CA, TOKEN, URL

PATH = "/apis/trainer.kubeflow.org/v1alpha1/namespaces/{namespace}/trainjobs/{job}/status"
MOST_BODY = 1 << 16


@dataclass
class StatusServer:
    url: str
    ca: Path
    token: Path
    path: str
    taken: list[dict[str, Any]] = field(default_factory=list)
    answers: int = 0
    """Status code of each answer; 0: the server decides."""

    @property
    def environ(self) -> dict[str, str]:
        return {URL: self.url, CA: str(self.ca), TOKEN: str(self.token)}

    def judge(self, path: str, headers: Any, body: bytes) -> int:
        """The status code that the operator's server gives."""
        if self.answers:
            return self.answers
        if path != self.path:
            return 404
        if headers["Authorization"] != f"Bearer {self.token.read_text().strip()}":
            return 403
        if len(body) > MOST_BODY:
            return 413
        try:
            found = json.loads(body)
            self._validate(found)
        except (ValueError, AssertionError, KeyError, TypeError):
            return 422
        self.taken.append(found)
        return 200

    def _validate(self, body: Any) -> None:
        """Validate the body by the models of the API and the limits of the CRD."""
        # Only here, because the package imports all models of Kubernetes: a second.
        from kubeflow_trainer_api.models import TrainerV1alpha1UpdateTrainJobStatusRequest

        read = TrainerV1alpha1UpdateTrainJobStatusRequest.from_dict(body)
        # The models ignore fields that they do not have, so compare what they understood.
        understood = json.loads(read.model_dump_json(by_alias=True, exclude_none=True))
        assert understood == body
        status = body["trainerStatus"]
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", status["lastUpdatedTime"])
        assert 0 <= status.get("progressPercentage", 0) <= 100
        assert 0 <= status.get("estimatedRemainingSeconds", 0) < 2**31
        assert len(status["metrics"]) <= 256
        for metric in status["metrics"]:
            assert all(1 <= len(one) <= 64 for one in metric.values())


@contextlib.contextmanager
def status_server(
    folder: Path, namespace: str = "team", job: str = "job"
) -> Iterator[StatusServer]:
    """Run the server; its token and certificates are in `folder`."""
    key, ca, token = (folder / name for name in ("key.pem", "ca.crt", "token"))
    path = PATH.format(namespace=namespace, job=job)
    words = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 1 -subj /CN=trainer"
    more = ("-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(ca))
    subprocess.run(["openssl", *words.split(), *more], check=True, capture_output=True)
    token.write_text("first-token\n")
    found = StatusServer("", ca, token, path)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            code = found.judge(self.path, self.headers, body)
            said = body if code == 200 else json.dumps({"message": f"no: {code}"}).encode()
            self.send_response(code)
            self.end_headers()
            self.wfile.write(said)

        def log_message(self, *_: Any) -> None:
            pass

    http_server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(ca, key)
    http_server.socket = context.wrap_socket(http_server.socket, server_side=True)
    found.url = f"https://127.0.0.1:{http_server.server_port}{path}"
    thread = threading.Thread(target=http_server.serve_forever, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        http_server.shutdown()
        http_server.server_close()
        thread.join()
