"""Runs commands in pods, like `kubectl exec`.

It uses the client's WSClient instead of its `stream()`, which reports every refusal as status 0 and
keeps all output twice.
"""

from collections.abc import Sequence
from importlib import import_module
from typing import Any

from orchestrator.backends.kubernetes.api.access import Access
from orchestrator.backends.kubernetes.api.api_errors import ApiRequest, refusal
from orchestrator.backends.kubernetes.api.requests import unreachable
from orchestrator.contract.read_json import read_json
from orchestrator.errors import Unanswered


def execute(
    access: Access,
    namespace: str,
    pod: str,
    container: str,
    argv: Sequence[str],
    *,
    timeout_s: float,
) -> tuple[int, bytes, bytes]:
    """Run a command in a pod; returns exit code, stdout and stderr."""
    client: Any = import_module("kubernetes.stream.ws_client")

    path = f"/api/v1/namespaces/{namespace}/pods/{pod}/exec"
    query = [("container", container), ("stdout", "true"), ("stderr", "true")]
    query += [("command", word) for word in argv]
    url = client.get_websocket_url(access.server + path, query)
    asked = ApiRequest(verb="create", path=path)
    import websocket

    try:
        socket = client.WSClient(
            access.config, url, access.headers(), capture_all=False, binary=True
        )
        try:
            socket.run_forever(timeout=timeout_s)
            # The command still runs after the timeout.
            if socket.is_open():
                raise Unanswered(f"`{' '.join(argv)}` in pod {pod} took over {timeout_s:.0f} s")
            return (
                _exit_code(socket.read_channel(client.ERROR_CHANNEL)),
                socket.read_channel(client.STDOUT_CHANNEL),
                socket.read_channel(client.STDERR_CHANNEL),
            )
        finally:
            socket.close()
    # The server refused before the connection became a websocket: the body says why.
    except websocket.WebSocketBadStatusException as exc:
        body = exc.resp_body or b""
        raise refusal(asked, exc.status_code, body) from exc
    except (websocket.WebSocketException, OSError) as exc:
        raise unreachable(access, exc) from exc


def _exit_code(status: bytes) -> int:
    """The exit code in the kubelet's final status of a command; 255 if it has none."""
    try:
        said = read_json(status)
        if said["status"] == "Success":
            return 0
        causes = said["details"]["causes"]
        return int(next(one["message"] for one in causes if one["reason"] == "ExitCode"))
    # The connection broke before the kubelet sent the status.
    except (ValueError, KeyError, TypeError, StopIteration):
        return 255
