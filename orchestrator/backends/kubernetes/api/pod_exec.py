"""Runs commands in pods, like `kubectl exec`.

It uses the client's WSClient instead of its `stream()`, which reports every refusal as status 0 and
keeps all output twice.
"""

import os
import select
import ssl
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from msgspec import Struct

from orchestrator.backends.kubernetes.api import framed_input
from orchestrator.backends.kubernetes.api.access import Access
from orchestrator.backends.kubernetes.api.api_errors import ApiRequest, refusal
from orchestrator.backends.kubernetes.api.requests import unreachable
from orchestrator.contract.read_json import read_json
from orchestrator.errors import Unanswered

Output = Callable[[bytes], object]
"""Takes output as it arrives."""
LISTEN_S = 10.0
"""A wait for output ends after this time, so that Ctrl-C and a closed connection are noticed."""
CHUNK = 8192
"""Bytes of input that are sent at a time. A socket that can be written takes so many at once, so
sending never blocks, and a command that writes before it reads on cannot cause a deadlock."""


class Input:
    """The standard input of a command in a pod."""

    def __init__(self, descriptor: int, python: str) -> None:
        """Args:
        descriptor: is read until it ends.
        python: interpreter in the pod, which takes the frames apart.
        """
        self.descriptor = descriptor
        self.python = python
        self.unsent = b""
        self.has_ended = False

    def exchange(self, socket: Any) -> None:
        """Wait until there is input, or output, or room for input, and pass it on."""
        connection = socket.sock.sock
        poll = select.poll()
        poll.register(connection, select.POLLIN | (select.POLLOUT if self.unsent else 0))
        if not self.unsent and not self.has_ended:
            poll.register(self.descriptor, select.POLLIN)
        # TLS may have decrypted output already, which poll cannot see.
        is_here = isinstance(connection, ssl.SSLSocket) and connection.pending()
        ready = dict(poll.poll(0 if is_here else LISTEN_S * 1000))
        if ready.get(connection.fileno(), 0) & select.POLLOUT:
            socket.write_stdin(self.unsent)
            self.unsent = b""
        if self.descriptor in ready:
            self._read()
        socket.update()

    def _read(self) -> None:
        try:
            data = os.read(self.descriptor, CHUNK)
        except OSError:  # such as a terminal that was closed
            data = b""
        self.unsent, self.has_ended = framed_input.frame(data), not data


class Streams(Struct, frozen=True, kw_only=True):
    """The standard streams of a command."""

    out: Output
    err: Output
    given: Input | None = None
    """Its standard input; None: it has none."""


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
    access: Access, namespace: str, pod: str, container: str, argv: Sequence[str], streams: Streams
) -> int:
    """Run a command in a pod until it ends, and pass its output on; returns the exit code."""
    given = streams.given
    if given is not None:
        argv = [given.python, "-c", Path(framed_input.__file__).read_text(), *argv]
    with _running(access, namespace, pod, container, argv, given) as (client, socket):
        outputs = ((client.STDOUT_CHANNEL, streams.out), (client.STDERR_CHANNEL, streams.err))
        while True:
            is_open = socket.is_open()
            if is_open and given is not None:
                given.exchange(socket)
            elif is_open:
                socket.update(timeout=LISTEN_S)
            for channel, write in outputs:
                if data := socket.read_channel(channel):
                    write(data)
            if not is_open:
                return _exit_code(socket.read_channel(client.ERROR_CHANNEL))


@contextmanager
def _running(
    access: Access,
    namespace: str,
    pod: str,
    container: str,
    argv: Sequence[str],
    given: Input | None = None,
) -> Iterator[tuple[Any, Any]]:
    """The client's module, and the connection to the command."""
    client: Any = import_module("kubernetes.stream.ws_client")

    path = f"/api/v1/namespaces/{namespace}/pods/{pod}/exec"
    query = [("container", container), ("stdout", "true"), ("stderr", "true")]
    query += [("stdin", "true")] if given is not None else []
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
            # The client leaves the socket open if the server closed the connection.
            socket.sock.shutdown()
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
