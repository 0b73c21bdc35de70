"""Commands in pods, over a real WebSocket, with real processes."""

import asyncio
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from aiohttp import web

from orchestrator.backends.kubernetes.api.client import Api
from orchestrator.backends.kubernetes.api.pod_exec import Input, Streams
from tests.agent.world import TurnedClock
from tests.kubernetes.standins.kubelet_server import run_command

pytestmark = pytest.mark.timeout(60)
LINES = b"".join(b"%07d\n" % number for number in range(131_072, 0, -1))
"""A megabyte, more than any buffer on the way."""


async def _exec(request: web.Request) -> web.StreamResponse:
    socket = web.WebSocketResponse(protocols=("v4.channel.k8s.io",))
    await socket.prepare(request)
    takes_input = request.query.get("stdin") == "true"
    argv = request.query.getall("command")
    await run_command(socket, argv, dict(os.environ), takes_input=takes_input)
    return socket


@pytest.fixture
def api(tmp_path: Path) -> Iterator[Api]:
    loop, ports = asyncio.new_event_loop(), list[int]()
    app = web.Application()
    app.router.add_get("/api/v1/namespaces/{namespace}/pods/{pod}/exec", _exec)
    runner = web.AppRunner(app, shutdown_timeout=1)

    async def start() -> None:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        ports.append(runner.addresses[0][1])

    loop.run_until_complete(start())
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    cluster = {"name": "c", "cluster": {"server": f"http://127.0.0.1:{ports[0]}"}}
    user = {"name": "u", "user": {"token": "t"}}
    context = {"name": "c", "context": {"cluster": "c", "user": "u"}}
    config = {"apiVersion": "v1", "kind": "Config", "current-context": "c"}
    lists = {"clusters": [cluster], "users": [user], "contexts": [context]}
    file = tmp_path / "kubeconfig"
    file.write_text(yaml.safe_dump({**config, **lists}))
    yield Api(None, {"KUBECONFIG": str(file)}, TurnedClock())
    asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(10)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def run(api: Api, source: Path | None, *argv: str) -> tuple[int, bytes, bytes]:
    """Exit code and output of a command whose input is the file `source`."""
    out, err = bytearray(), bytearray()
    if source is None:
        streams = Streams(out=out.extend, err=err.extend)
        return api.stream_exec("ns", "pod", "c", argv, streams), bytes(out), bytes(err)
    with source.open("rb") as file:
        given = Input(file.fileno(), sys.executable)
        streams = Streams(out=out.extend, err=err.extend, given=given)
        code = api.stream_exec("ns", "pod", "c", argv, streams)
    return code, bytes(out), bytes(err)


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    (tmp_path / "lines").write_bytes(LINES)
    return tmp_path / "lines"


def test_a_command_reads_its_input_to_its_end(api: Api, lines: Path) -> None:
    code, out, err = run(api, lines, "sort")
    assert (code, err) == (0, b"")
    assert out.split() == sorted(LINES.split())


def test_input_and_output_flow_at_the_same_time(api: Api, lines: Path) -> None:
    """More output than the sockets hold, while more input waits: nobody waits for the other."""
    code, out, err = run(api, lines, "tee", "/dev/stderr")
    assert (code, out, err) == (0, LINES, LINES)


@pytest.mark.parametrize(
    ("script", "code"), [("exit 7", 7), ("read line; exit 3", 3), ("kill -TERM $$", 128 + 15)]
)
def test_a_command_that_reads_little_ends_with_its_own_exit_code(
    api: Api, lines: Path, script: str, code: int
) -> None:
    assert run(api, lines, "sh", "-c", script)[0] == code


def test_a_command_ends_although_its_input_does_not(api: Api) -> None:
    reading, writing = os.pipe()
    try:
        os.write(writing, b"one\n")
        out = bytearray()
        argv = ["sh", "-c", "read line; echo got $line"]
        given = Input(reading, sys.executable)
        streams = Streams(out=out.extend, err=out.extend, given=given)
        assert api.stream_exec("ns", "pod", "c", argv, streams) == 0
        assert out == b"got one\n"
    finally:
        os.close(reading)
        os.close(writing)


def test_an_empty_input_and_no_input_end_at_once(api: Api, tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    assert run(api, tmp_path / "empty", "cat") == (0, b"", b"")
    assert run(api, None, "cat") == (0, b"", b"")


def test_a_missing_program_is_named_as_a_shell_names_it(api: Api, lines: Path) -> None:
    code, out, err = run(api, lines, "no-such-program")
    assert (code, out) == (127, b"")
    assert err == b"no-such-program: No such file or directory\n"
