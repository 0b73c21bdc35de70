"""The leader's port over real connections: only clients with a proof of the job are admitted."""

import asyncio
import contextlib
import json
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

import aiohttp
import pytest

from orchestrator.agent.handshake import proof_headers
from orchestrator.contract.codec import encode_tagged
from orchestrator.contract.messages.agent_protocol import (
    AGENT_PATH,
    CANCEL_PATH,
    REPORT_BYTES,
    Claim,
    Proof,
)
from orchestrator.contract.messages.events import AgentRegistered, CancelRequested
from orchestrator.job_secret import client_context, draw, prove, secret_from
from orchestrator.journal.journal import read
from orchestrator.leader import tls_port
from orchestrator.leader.leader_server import LeaderServer
from orchestrator.leader.tls_port import STRANGER_BYTES, Door
from orchestrator.web import refusals
from tests.agent.world import LAUNCH, SECRET, WAIT_S, until
from tests.leader import leader_world
from tests.leader.leader_world import PIN, LedJob

CLAIM = Claim(purpose="cancel", launch=LAUNCH)
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def door_of(job: LedJob) -> Door:
    assert isinstance(job.leader.server, LeaderServer)
    assert job.leader.server.door is not None
    return job.leader.server.door


def address(job: LedJob) -> tuple[str, int]:
    host, port = job.url.removeprefix("https://").split(":")
    return host, int(port)


OPENED: list[asyncio.StreamWriter] = []


def play(folder: Path, script: Callable[[LedJob], Awaitable[None]]) -> None:
    async def close_all(job: LedJob) -> None:
        try:
            await script(job)
        finally:
            for writer in OPENED:
                writer.transport.abort()
            OPENED.clear()

    leader_world.run_script(folder, close_all)


async def connect_tcp(job: LedJob) -> Connection:
    """A TCP connection on which nothing is sent yet."""
    reader, writer = await asyncio.open_connection(*address(job))
    OPENED.append(writer)
    return reader, writer


async def connect_tls(job: LedJob) -> Connection:
    """A connection after the TLS handshake."""
    reader, writer = await asyncio.open_connection(*address(job), ssl=client_context())
    OPENED.append(writer)
    return reader, writer


async def wait_closed(reader: asyncio.StreamReader) -> None:
    with contextlib.suppress(OSError):
        await asyncio.wait_for(reader.read(), WAIT_S)


async def ask(of: Connection, *headers: str, path: str = CANCEL_PATH) -> tuple[int, str]:
    """Status and new nonce, for a request with bytes that the client of aiohttp would not send."""
    reader, writer = of
    text = "".join(f"{one}\r\n" for one in (f"POST {path} HTTP/1.1", "Host: x", *headers))
    writer.write(f"{text}Content-Length: 2\r\n\r\n{{}}".encode(errors="surrogateescape"))
    head = (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), WAIT_S)).decode()
    status, *lines = head.split("\r\n")
    found = {name.lower(): value for name, _, value in (one.partition(": ") for one in lines)}
    await reader.readexactly(int(found.get("content-length", "0")))
    return int(status.split()[1]), found.get("www-authenticate", "").removeprefix("ndctl ")


def authorization(nonce: str, claim: Claim = CLAIM) -> str:
    return f"Authorization: {proof_headers(SECRET, nonce, claim)['Authorization']}"


def is_unchanged(folder: Path, script: Callable[[LedJob], Awaitable[None]]) -> None:
    """Assert that `script` changes nothing in the journal of the job."""

    async def compare_journal(job: LedJob) -> None:
        await until(lambda: len(read(job.run_dir.journal)) == 2, "the line that the leader started")
        before = job.run_dir.journal.read_bytes()
        await script(job)
        assert job.run_dir.journal.read_bytes() == before

    play(folder, compare_journal)


WRONG = [
    "",
    "Bearer x",
    "ndctl",
    "ndctl {}",
    "ndctl " + "[" * 5_000,
    "ndctl t\udce9",
    "ndctl 1e999",
]


def test_without_a_proof_everything_is_refused_and_nothing_changes(tmp_path: Path) -> None:
    async def script(job: LedJob) -> None:
        for header in WRONG:
            of = await connect_tls(job)
            status, nonce = await ask(of, f"Authorization: {header}")
            assert (status, bool(nonce)) == (401, True), header
        assert (await ask(await connect_tls(job), path="/"))[0] == 401
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            await job.session.ws_connect(job.url + AGENT_PATH, ssl=PIN)
        assert refused.value.status == 401

    is_unchanged(tmp_path, script)


def test_a_proof_is_valid_once_on_its_own_connection_and_for_its_purpose(tmp_path: Path) -> None:
    """Replays are refused, even of a proof that was valid when it was recorded."""

    async def script(job: LedJob) -> None:
        one, two = await connect_tls(job), await connect_tls(job)
        _, nonce = await ask(one)
        right = authorization(nonce)
        await ask(two)
        assert (await ask(two, right))[0] == 401  # this connection has its own nonce
        assert (await ask(one, authorization(nonce, Claim(purpose="agent", launch=LAUNCH))))[
            0
        ] == 401
        assert (await ask(one, right))[0] == 401  # the nonce is valid for one request
        _, nonce = await ask(one)
        proof = Proof(claim=CLAIM, mac=prove(secret_from(draw()), nonce, CLAIM))
        other = json.dumps(encode_tagged(proof))
        assert (await ask(one, f"Authorization: ndctl {other}"))[0] == 401
        _, nonce = await ask(one)
        assert (await ask(one, authorization(nonce, Claim(purpose="cancel", launch=99))))[0] == 409

    is_unchanged(tmp_path, script)


def test_a_valid_proof_cancels_the_job(tmp_path: Path) -> None:
    async def script(job: LedJob) -> None:
        of = await connect_tls(job)
        _, nonce = await ask(of)
        assert (await ask(of, authorization(nonce)))[0] == 202
        assert (await job.wait_for_event(CancelRequested)).by == "somebody"

    play(tmp_path, script)


def test_an_agent_may_register_only_the_host_in_its_proof(tmp_path: Path) -> None:
    async def script(job: LedJob) -> None:
        agent = await job.connect("host-0")
        agent.host = "host-1"
        await agent.register()
        await agent.wait_closed()
        assert agent.ws.close_code == aiohttp.WSCloseCode.POLICY_VIOLATION
        assert job.events(AgentRegistered) == []

    play(tmp_path, script)


DEEP = "[" * 60_000


def test_a_body_that_cannot_be_read_is_a_bad_request(tmp_path: Path) -> None:
    async def script(job: LedJob) -> None:
        for body in (DEEP.encode(), b"{", b"[]", b"", b"\xff"):
            assert await job.request_cancel(body) == 400
        assert await job.request_cancel(b"{}", kind="application/json; charset=bogus") == 400
        assert await job.request_cancel(b" " * 100_000) == 413

    is_unchanged(tmp_path, script)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (DEEP, aiohttp.WSCloseCode.INVALID_TEXT),
        ("{", aiohttp.WSCloseCode.INVALID_TEXT),
        (" " * (REPORT_BYTES + 1), aiohttp.WSCloseCode.MESSAGE_TOO_BIG),
    ],
    ids=["deep", "half", "long"],
)
def test_an_unreadable_message_closes_its_connection_with_the_reason(
    tmp_path: Path, text: str, code: int
) -> None:
    async def script(job: LedJob) -> None:
        long = len(text) > REPORT_BYTES
        for registered in (False, True):
            agent = await (job.agent if registered else job.connect)("host-0", 100 + registered)
            await agent.ws.send_str(text)
            await agent.wait_closed()
            # Bytes in flight while the leader closes can hide the close code from the sender.
            assert agent.ws.close_code in (code, long and aiohttp.WSCloseCode.ABNORMAL_CLOSURE)

    play(tmp_path, script)


def test_a_client_without_a_proof_in_time_is_disconnected(tmp_path: Path) -> None:
    """It sends nothing, only a TLS handshake, half of its headers, or one refused request."""

    async def script(job: LedJob) -> None:
        agent = await job.agent("host-0")
        silent, _ = await connect_tcp(job)
        handshaken, _ = await connect_tls(job)
        half_sent, writer = await connect_tls(job)
        writer.write(b"GET /v1/agent HTTP/1.1\r\nX: ")
        refused = await connect_tls(job)
        await ask(refused)
        await until(lambda: len(door_of(job).strangers) == 4, "four clients without a proof")
        job.clock.put_forward(tls_port.ENTER_S + 1)
        for reader in (silent, handshaken, half_sent, refused[0]):
            await wait_closed(reader)
        await until(lambda: not door_of(job).strangers, "the end of their connections")
        assert not agent.ws.closed

    play(tmp_path, script)


def test_too_many_clients_without_proof_do_not_keep_agents_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls_port, "STRANGERS", 20)

    async def script(job: LedJob) -> None:
        door, held = door_of(job), [await connect_tcp(job) for _ in range(50)]
        await until(lambda: len(door.strangers) == 20, "twenty admitted connections")
        entering = asyncio.create_task(job.agent("host-0"))
        while not entering.done():
            assert len(door.strangers) <= 20
            job.clock.put_forward(tls_port.GRACE_S / 10)
            await asyncio.sleep(0.01)
        await entering
        await job.wait_for_event(AgentRegistered)
        for reader, _ in held[:31]:
            await wait_closed(reader)

    play(tmp_path, script)


def test_a_client_without_a_proof_can_send_little(tmp_path: Path) -> None:
    async def script(job: LedJob) -> None:
        reader, writer = await connect_tls(job)
        writer.write(b"GET / HTTP/1.1\r\n")
        with contextlib.suppress(OSError):
            for _ in range(STRANGER_BYTES // 1_000 + 100):
                writer.write(b"X: " + b"x" * 997 + b"\r\n")
                await writer.drain()
        await wait_closed(reader)
        reader, writer = await connect_tls(job)
        writer.write(b"POST / HTTP/1.1\r\nContent-Length: 99999999\r\n\r\n" + b"x" * 200_000)
        await wait_closed(reader)
        await until(lambda: door_of(job).refusals.total, "a counted refusal")

    is_unchanged(tmp_path, script)


def test_bad_requests_are_counted_and_logged_once_a_minute(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    async def script(job: LedJob) -> None:
        door = door_of(job)
        for number in range(30):
            reader, writer = await connect_tls(job)
            writer.write(b"\0\1\2 nonsense\r\n\r\n" if number % 2 else b"GET / HTTP/9.9.9\r\n\r\n")
            assert (await asyncio.wait_for(reader.read(), WAIT_S)).startswith(b"HTTP/1.0 400")
            reader, writer = await connect_tcp(job)
            writer.write(b"GET / HTTP/1.1\r\n\r\n")
            await wait_closed(reader)
        await until(lambda: door.refusals.total == 60, "sixty refusals")
        assert len(refusal_lines(caplog)) == 1
        job.clock.put_forward(refusals.TELL_S + 1)
        await until(lambda: len(refusal_lines(caplog)) == 2, "the second log line")
        second = refusal_lines(caplog)[1]
        assert "30 failed the TLS handshake" in second or "29 failed the TLS handshake" in second
        assert not [record for record in caplog.records if record.exc_info]

    play(tmp_path, script)


def refusal_lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [text for text in caplog.messages if "refused connections at the leader's port" in text]
