"""Runs commands in pods, like `kubectl exec`.

It uses the client's WSClient instead of its `stream()`, which reports every refusal as status 0 and
keeps all output twice.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from orchestrator.backends.kubernetes.api.access import Access
from orchestrator.backends.kubernetes.api.api_errors import ApiRequest, refusal
from orchestrator.backends.kubernetes.api.requests import unreachable
from orchestrator.contract.read_json import read_json
from orchestrator.errors import Unanswered

Output = Callable[[bytes], object]
"""Takes output as it arrives."""
LISTEN_S = 10.0
"""A wait for output ends after this time, so that Ctrl-C and a closed connection are noticed."""


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
    with _running(access, namespace, pod, container, argv) as (client, socket):
        socket.run_forever(timeout=timeout_s)
        # The command still runs after the timeout.
        if socket.is_open():
            raise Unanswered(f"`{' '.join(argv)}` in pod {pod} took over {timeout_s:.0f} s")
        return (
            _exit_code(socket.read_channel(client.ERROR_CHANNEL)),
            socket.read_channel(client.STDOUT_CHANNEL),
            socket.read_channel(client.STDERR_CHANNEL),
        )


def stream(
    access: Access,
    namespace: str,
    pod: str,
    container: str,
    argv: Sequence[str],
    outputs: tuple[Output, Output],
) -> int:
    """Run a command in a pod until it ends, and pass its output on; returns the exit code.

    Args:
        outputs: for stdout and stderr.
    """
    with _running(access, namespace, pod, container, argv) as (client, socket):
        channels = (client.STDOUT_CHANNEL, client.STDERR_CHANNEL)
        while True:
            is_open = socket.is_open()
            if is_open:
                socket.update(timeout=LISTEN_S)
            for channel, write in zip(channels, outputs, strict=True):
                if data := socket.read_channel(channel):
                    write(data)
            if not is_open:
                return _exit_code(socket.read_channel(client.ERROR_CHANNEL))


@contextmanager
def _running(
    access: Access, namespace: str, pod: str, container: str, argv: Sequence[str]
) -> Iterator[tuple[Any, Any]]:
    """The client's module, and the connection to the command."""
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
            yield client, socket
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
