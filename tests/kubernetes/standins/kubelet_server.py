"""The kubelet's HTTP server, which the API server calls for `kubectl logs` and for exec.

Exec works over WebSocket only.
"""

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

from aiohttp import web

from tests.kubernetes.standins.api import Object
from tests.kubernetes.standins.kubelet import Kubelet
from tests.kubernetes.standins.pod import PodRun

STDOUT, STDERR, ERROR = 1, 2, 3
"""Channels of v4.channel.k8s.io; the channel is the first byte of each message."""


async def serve(kubelet: Kubelet, addresses: list[str], pki: Path) -> web.AppRunner:
    """Listens on the same port of every node's address; accepts only the API server's client
    certificate."""
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(pki / "ca.crt"))
    tls.load_cert_chain(pki / "kubelet.crt", pki / "kubelet.key")
    tls.verify_mode = ssl.CERT_REQUIRED
    app = web.Application()
    server = _Server(kubelet)
    app.router.add_get("/containerLogs/{namespace}/{pod}/{container}", server.logs)
    for verb in ("GET", "POST"):
        app.router.add_route(verb, "/exec/{namespace}/{pod}/{container}", server.exec)
    runner = web.AppRunner(app, shutdown_timeout=1)
    await runner.setup()
    for address in addresses:
        await web.TCPSite(runner, address, kubelet.port, ssl_context=tls).start()
        kubelet.port = kubelet.port or runner.addresses[0][1]
    return runner


class _Server:
    def __init__(self, kubelet: Kubelet) -> None:
        self.kubelet = kubelet

    def _run(self, request: web.Request) -> PodRun:
        key = f"{request.match_info['namespace']}/{request.match_info['pod']}"
        run = self.kubelet.run_of(key)
        if run is None:
            raise web.HTTPNotFound(text=f'pod "{key}" not found')
        return run

    async def logs(self, request: web.Request) -> web.StreamResponse:
        run, asked = self._run(request), request.query
        name = request.match_info["container"]
        stream = web.StreamResponse()
        await stream.prepare(request)
        log = run.log(name, previous=asked.get("previous") == "true")
        follow = asked.get("follow") == "true"
        async for line in _lines(run, name, log, _since(asked.get), follow, asked.get("tailLines")):
            shown = line if asked.get("timestamps") == "true" else line.partition(b" ")[2]
            await stream.write(shown)
        return stream

    async def exec(self, request: web.Request) -> web.StreamResponse:
        run = self._run(request)
        container = run.containers.get(request.match_info["container"])
        if container is None or not container.pids():
            raise web.HTTPBadRequest(text="the container is not running")
        socket = web.WebSocketResponse(protocols=("v4.channel.k8s.io",))
        await socket.prepare(request)
        command = container.command(request.query.getall("command"))
        # The API server renames `stdin=true` of its clients.
        takes_input = request.query.get("input") == "1"
        await run_command(socket, command, dict(container.environ), takes_input=takes_input)
        return socket


async def run_command(
    socket: web.WebSocketResponse, argv: list[str], environ: dict[str, str], *, takes_input: bool
) -> None:
    """Runs a command with its streams on the channels of `socket`, which it closes."""
    process = await asyncio.create_subprocess_exec(
        *argv,
        env=environ,
        stdin=asyncio.subprocess.PIPE if takes_input else asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    reading = asyncio.create_task(_feed(socket, process))
    await asyncio.gather(
        _pump(socket, STDOUT, process.stdout), _pump(socket, STDERR, process.stderr)
    )
    status = json.dumps(_verdict(await process.wait())).encode()
    await socket.send_bytes(bytes([ERROR]) + status)
    reading.cancel()
    await socket.close()


async def _feed(socket: web.WebSocketResponse, process: asyncio.subprocess.Process) -> None:
    """Copies the client's input to the command; kills the command when the client disconnects."""
    async for message in socket:
        data = message.data if isinstance(message.data, bytes) else message.data.encode()
        if data[:1] == b"\0" and process.stdin is not None:
            process.stdin.write(data[1:])
            with contextlib.suppress(ConnectionError):  # The command reads no more.
                await process.stdin.drain()
    with contextlib.suppress(ProcessLookupError):
        process.kill()


async def _pump(socket: web.WebSocketResponse, channel: int, stream: asyncio.StreamReader) -> None:
    while chunk := await stream.read(2**16):
        await socket.send_bytes(bytes([channel]) + chunk)


def _verdict(code: int) -> Object:
    if code == 0:
        return {"metadata": {}, "status": "Success"}
    message = f"command terminated with non-zero exit code: {code}"
    causes = [{"reason": "ExitCode", "message": str(code)}]
    failure = {"status": "Failure", "reason": "NonZeroExitCode", "message": message}
    return {"metadata": {}, **failure, "details": {"causes": causes}}


def _since(asked: object) -> bytes:
    """Timestamp of the first line to return, in the format of the log."""
    assert callable(asked)
    if seconds := asked("sinceSeconds"):
        since = datetime.now(UTC) - timedelta(seconds=int(seconds))
        return since.strftime("%Y-%m-%dT%H:%M:%S").encode()
    return str(asked("sinceTime", "")).removesuffix("Z").encode()


async def _lines(
    run: PodRun, container: str, log: Path, since: bytes, follow: bool, tail: str | None
) -> AsyncIterator[bytes]:
    """Whole lines of the log; with `follow`, until the container ends."""
    if not log.exists():
        return
    with log.open("rb") as file:
        there = [line for line in file.readlines() if line >= since]
        for line in there if tail is None else there[len(there) - int(tail) :]:
            yield line
        while follow:
            over = "running" not in run.states[container]["state"]
            while line := file.readline():
                yield line
            if over:
                return
            await asyncio.sleep(0.1)
