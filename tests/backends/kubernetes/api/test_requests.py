"""Requests to an API server and its answers, over a real connection."""

import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import parse_qs, urlsplit

import pytest
import urllib3
import yaml

from orchestrator.backends.kubernetes.api.client import Api
from orchestrator.backends.kubernetes.api.requests import warnings_in
from orchestrator.backends.kubernetes.resources import PODS
from orchestrator.errors import BackendError, Unanswered, Unreachable
from tests.agent.world import TurnedClock

UNTYPED = (
    '{"kind":"Status","apiVersion":"v1","metadata":{},"status":"Failure","message":"failed to'
    " create typed patch object (general/admin-api; /v1, Kind=Service): .spec.topologyKeys: field"
    ' not declared in schema","code":500}'
)
"""Answer of every version to an apply with an unknown field (kubernetes issue 122480)."""
STRICT = json.dumps(
    {
        "kind": "Status",
        "status": "Failure",
        "message": 'PyTorchJob in version "v1" cannot be handled as a PyTorchJob: strict decoding'
        ' error: unknown field "spec.nprocPerPod"',
        "reason": "BadRequest",
        "code": 400,
    }
)
"""Answer of servers from 1.25 on to `fieldValidation=Strict`."""


class Server(BaseHTTPRequestHandler):
    """Gives each request the next of `answers`: status, headers, body."""

    answers: ClassVar[list[tuple[int, list[tuple[str, str]], str]]] = []
    asked: ClassVar[list[dict[str, list[str]]]] = []
    bodies: ClassVar[list[bytes]] = []

    def do_PATCH(self) -> None:
        self.bodies.append(self.rfile.read(int(self.headers.get("Content-Length", 0))))
        self.asked.append(parse_qs(urlsplit(self.path).query))
        status, headers, body = self.answers.pop(0)
        self.send_response(status)
        for name, value in headers:
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    do_GET = do_POST = do_PATCH

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def api(tmp_path: Path) -> Iterator[Api]:
    Server.answers, Server.asked, Server.bodies = [], [], []
    server = HTTPServer(("127.0.0.1", 0), Server)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        "clusters": [
            {"name": "c", "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}
        ],
        "users": [{"name": "u", "user": {}}],
    }
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(yaml.safe_dump(config))
    try:
        yield Api(None, {"KUBECONFIG": str(kubeconfig)}, TurnedClock())
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


CONFIG_MAP = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a"}}


def applied(api: Api) -> None:
    api.apply(CONFIG_MAP, "ns", dry_run=True)


def test_an_apply_asks_for_strict_validation(api: Api) -> None:
    Server.answers = [(200, [], "{}"), (400, [], STRICT)]
    applied(api)
    assert Server.asked[0]["fieldValidation"] == ["Strict"]
    assert Server.asked[0]["dryRun"] == ["All"]
    with pytest.raises(BackendError, match=r'unknown field "spec\.nprocPerPod"') as refused:
        applied(api)
    assert not isinstance(refused.value, Unanswered)


def test_a_field_without_a_schema_is_refused_and_not_retried(api: Api) -> None:
    Server.answers = [(500, [], UNTYPED)]
    with pytest.raises(BackendError, match=r"\.spec\.topologyKeys: field not declared") as refused:
        applied(api)
    assert not isinstance(refused.value, Unanswered)
    assert len(Server.asked) == 1, "a retry would get the same answer"


def test_an_apply_is_yaml_also_with_characters_that_json_would_escape_twice(api: Api) -> None:
    Server.answers = [(200, [], "{}")]
    every = "".join(map(chr, [*range(0x100), 0x2028, 0x2029, 0xFEFF, 0xFFFE, 0x1F680, 0x10FFFF]))
    item = {**CONFIG_MAP, "data": {"a": f"{every}\\ud83d \\\\ude80"}}
    api.apply(item, "ns")
    assert yaml.load(Server.bodies[0], yaml.CSafeLoader) == item  # libyaml is as strict as Go's


@pytest.mark.parametrize(
    ("status", "header", "body", "words"),
    [
        (200, ("Content-Type", "text/html"), "<html>\nLog in</html>", "text/html: <html> Log in"),
        (200, ("Content-Type", "application/json"), "[]", r"application/json: \[\]"),
        (200, ("X-A", "b"), "", "no content type: empty"),
        (302, ("Location", "/login"), "", "redirect to /login: empty"),
    ],
)
def test_a_login_page_in_place_of_an_api_server_is_named(
    api: Api, status: int, header: tuple[str, str], body: str, words: str
) -> None:
    Server.answers = [(status, [header], body)]
    with pytest.raises(BackendError, match=rf"is not a Kubernetes API server \({words}") as failed:
        api.read("/version")
    assert not isinstance(failed.value, Unanswered)
    assert api.server in failed.value.message
    assert "context c in " in failed.value.fix


def test_a_watch_that_is_not_json_is_an_error_that_a_retry_may_heal(api: Api) -> None:
    Server.answers = [(200, [("Content-Type", "text/html")], "<html>")]
    with pytest.raises(Unanswered, match="is not JSON"):
        list(api.watch(PODS, "ns", version="1", timeout_s=1))


@pytest.mark.parametrize(
    ("verb", "in_pod", "tries"), [("get", False, 1), ("get", True, 3), ("patch", False, 3)]
)
def test_a_read_of_a_silent_server_is_not_repeated_in_a_terminal(
    api: Api, monkeypatch: pytest.MonkeyPatch, verb: str, in_pod: bool, tries: int
) -> None:
    """A patch may be sent again, because it changes nothing the second time."""
    sent = []

    def send(*_: Any) -> None:
        sent.append(verb)
        raise urllib3.exceptions.ReadTimeoutError(Any, "/", "Read timed out.")  # type: ignore[arg-type]

    monkeypatch.setattr(type(api.access), "in_cluster", in_pod)
    monkeypatch.setattr(api.sending, "_send", send)
    with pytest.raises(Unreachable):
        api.sending.json(verb, "/version")
    assert len(sent) == tries


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (
            500,
            "rpc error: code = ResourceExhausted desc = trying to send message larger than max"
            " (3090386 vs. 2097152)",
        ),
        (500, "etcdserver: request is too large"),
        (413, "Request entity too large: limit is 3145728"),
    ],
)
def test_an_object_that_is_too_large_is_refused_and_not_retried(
    api: Api, status: int, message: str
) -> None:
    Server.answers = [(status, [], json.dumps({"kind": "Status", "message": message}))]
    with pytest.raises(BackendError, match=re.escape(message)) as refused:
        api.create(CONFIG_MAP, "ns")
    assert not isinstance(refused.value, Unanswered)
    assert "1,572,864 bytes" in refused.value.fix
    assert "env_from" in refused.value.fix
    assert len(Server.asked) == 1


def test_a_client_key_that_cannot_be_loaded_is_not_told_as_an_unreachable_server(
    api: Api, tmp_path: Path
) -> None:
    kubeconfig = tmp_path / "kubeconfig"
    config = yaml.safe_load(kubeconfig.read_text())
    cluster, user = config["clusters"][0]["cluster"], config["users"][0]["user"]
    cluster |= {"server": cluster["server"].replace("http:", "https:")}
    cluster |= {"insecure-skip-tls-verify": True}
    user |= {"client-certificate-data": "AAAA", "client-key-data": "AAAA"}
    kubeconfig.write_text(yaml.safe_dump(config))
    with pytest.raises(BackendError, match=r"certificates of context c in .* cannot be") as refused:
        applied(api)
    assert not isinstance(refused.value, Unanswered)
    assert "traceback" not in refused.value.message
    assert "log in" in refused.value.fix


def test_each_warning_of_the_server_is_kept_once(api: Api) -> None:
    said = (
        '299 - "would violate PodSecurity \\"restricted:latest\\": allowPrivilegeEscalation !='
        ' false (container \\"a\\", b)"'
    )
    again = ("Warning", said)
    other = ("Warning", '299 - "unknown field \\"spec.x\\""')
    Server.answers = [(200, [again, other], "{}"), (200, [again], "{}")]
    applied(api)
    applied(api)
    assert api.warnings == (
        'would violate PodSecurity "restricted:latest": allowPrivilegeEscalation != false'
        ' (container "a", b)',
        'unknown field "spec.x"',
    )


@pytest.mark.parametrize(
    ("header", "texts"),
    [
        (None, []),
        ("", []),
        ('299 - "a"', ["a"]),
        ('299 - "a, b", 299 - "c"', ["a, b", "c"]),
        (
            '299 kube-apiserver "policy/v1beta1 is deprecated" "Mon, 01 Jan 2024 00:00:00 GMT"',
            ["policy/v1beta1 is deprecated"],
        ),
        ("nonsense", []),
    ],
)
def test_a_header_may_hold_several_warnings(header: str | None, texts: list[str]) -> None:
    assert warnings_in(header) == texts
