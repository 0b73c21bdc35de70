"""The leader's port, and those who are not of the job: over real connections."""

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
from orchestrator.leader import tls_port as doors
from orchestrator.leader.leader_server import LeaderServer
from orchestrator.leader.tls_port import STRANGER_BYTES, Door
from tests.agent.world import LAUNCH, SECRET, WAIT_S, until
from tests.leader import leader_world
from tests.leader.leader_world import PIN, Led

CLAIM = Claim(purpose="cancel", launch=LAUNCH)
Line = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def door_of(job: Led) -> Door:
    assert isinstance(job.leader.server, LeaderServer)
    assert job.leader.server.door is not None
    return job.leader.server.door


def address(job: Led) -> tuple[str, int]:
    host, port = job.url.removeprefix("https://").split(":")
    return host, int(port)


OPENED: list[asyncio.StreamWriter] = []


def play(folder: Path, script: Callable[[Led], Awaitable[None]]) -> None:
    async def closed(job: Led) -> None:
        try:
            await script(job)
        finally:
            for writer in OPENED:
                writer.transport.abort()
            OPENED.clear()

    leader_world.play(folder, closed)


async def plain(job: Led) -> Line:
    """A connection, and nothing said yet."""
    reader, writer = await asyncio.open_connection(*address(job))
    OPENED.append(writer)
    return reader, writer


async def line(job: Led) -> Line:
    """The same with TLS."""
    reader, writer = await asyncio.open_connection(*address(job), ssl=client_context())
    OPENED.append(writer)
    return reader, writer


async def is_cut(reader: asyncio.StreamReader) -> None:
    with contextlib.suppress(OSError):
        await asyncio.wait_for(reader.read(), WAIT_S)


async def ask(of: Line, *headers: str, path: str = CANCEL_PATH) -> tuple[int, str]:
    """The status and the new number, of bytes that aiohttp's own client would not send."""
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


def is_unchanged(folder: Path, script: Callable[[Led], Awaitable[None]]) -> None:
    """What `script` does changes nothing of the job."""

    async def watched(job: Led) -> None:
        await until(lambda: len(read(job.run_dir.journal)) == 2, "the leader's own line")
        before = job.run_dir.journal.read_bytes()
        await script(job)
        assert job.run_dir.journal.read_bytes() == before

    play(folder, watched)


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
    async def script(job: Led) -> None:
        for header in WRONG:
            of = await line(job)
            status, nonce = await ask(of, f"Authorization: {header}")
            assert (status, bool(nonce)) == (401, True), header
        assert (await ask(await line(job), path="/"))[0] == 401
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            await job.session.ws_connect(job.url + AGENT_PATH, ssl=PIN)
        assert refused.value.status == 401

    is_unchanged(tmp_path, script)


def test_a_proof_is_good_once_on_its_own_connection_and_for_its_purpose(tmp_path: Path) -> None:
    """Replays are refused, also those of what was recorded where it was right."""

    async def script(job: Led) -> None:
        one, two = await line(job), await line(job)
        _, nonce = await ask(one)
        right = authorization(nonce)
        await ask(two)
        assert (await ask(two, right))[0] == 401  # it has a number of its own
        assert (await ask(one, authorization(nonce, Claim(purpose="agent", launch=LAUNCH))))[
            0
        ] == 401
        assert (await ask(one, right))[0] == 401  # the number was for one try
        _, nonce = await ask(one)
        proof = Proof(claim=CLAIM, mac=prove(secret_from(draw()), nonce, CLAIM))
        other = json.dumps(encode_tagged(proof))
        assert (await ask(one, f"Authorization: ndctl {other}"))[0] == 401
        _, nonce = await ask(one)
        assert (await ask(one, authorization(nonce, Claim(purpose="cancel", launch=99))))[0] == 409

    is_unchanged(tmp_path, script)


def test_the_right_proof_cancels(tmp_path: Path) -> None:
    async def script(job: Led) -> None:
        of = await line(job)
        _, nonce = await ask(of)
        assert (await ask(of, authorization(nonce)))[0] == 202
        assert (await job.happens(CancelRequested)).by == "somebody"

    play(tmp_path, script)


def test_an_agent_speaks_for_the_host_alone_that_it_has_proved_to_be(tmp_path: Path) -> None:
    async def script(job: Led) -> None:
        agent = await job.connect("host-0")
        agent.host = "host-1"
        await agent.register()
        await agent.is_closed()
        assert agent.ws.close_code == aiohttp.WSCloseCode.POLICY_VIOLATION
        assert job.events(AgentRegistered) == []

    play(tmp_path, script)


DEEP = "[" * 60_000


def test_a_body_that_cannot_be_read_is_a_bad_request(tmp_path: Path) -> None:
    async def script(job: Led) -> None:
        for body in (DEEP.encode(), b"{", b"[]", b"", b"\xff"):
            assert await job.cancels(body) == 400
        assert await job.cancels(b"{}", kind="application/json; charset=bogus") == 400
        assert await job.cancels(b" " * 100_000) == 413

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
def test_a_message_that_cannot_be_read_closes_its_connection_and_says_so(
    tmp_path: Path, text: str, code: int
) -> None:
    async def script(job: Led) -> None:
        long = len(text) > REPORT_BYTES
        for registered in (False, True):
            agent = await (job.agent if registered else job.connect)("host-0", 100 + registered)
            await agent.ws.send_str(text)
            await agent.is_closed()
            # What is still under way as the leader closes can hide its word from the sender.
            assert agent.ws.close_code in (code, long and aiohttp.WSCloseCode.ABNORMAL_CLOSURE)

    play(tmp_path, script)


def test_who_proves_nothing_in_time_is_cut_off(tmp_path: Path) -> None:
    """Whether it says nothing at all, speaks TLS and no more, or stops within its headers."""

    async def script(job: Led) -> None:
        agent = await job.agent("host-0")
        silent, _ = await plain(job)
        met, _ = await line(job)
        half, writer = await line(job)
        writer.write(b"GET /v1/agent HTTP/1.1\r\nX: ")
        asked = await line(job)
        await ask(asked)
        await until(lambda: len(door_of(job).strangers) == 4, "four of them")
        job.clock.put_forward(doors.ENTER_S + 1)
        for reader in (silent, met, half, asked[0]):
            await is_cut(reader)
        await until(lambda: not door_of(job).strangers, "their end")
        assert not agent.ws.closed

    play(tmp_path, script)


def test_of_too_many_the_oldest_make_room_and_agents_get_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doors, "STRANGERS", 20)

    async def script(job: Led) -> None:
        door, held = door_of(job), [await plain(job) for _ in range(50)]
        await until(lambda: len(door.strangers) == 20, "twenty to be let in")
        entering = asyncio.create_task(job.agent("host-0"))
        while not entering.done():
            assert len(door.strangers) <= 20
            job.clock.put_forward(doors.GRACE_S / 10)
            await asyncio.sleep(0.01)
        await entering
        await job.happens(AgentRegistered)
        for reader, _ in held[:31]:
            await is_cut(reader)

    play(tmp_path, script)


def test_before_its_proof_nobody_sends_much(tmp_path: Path) -> None:
    async def script(job: Led) -> None:
        reader, writer = await line(job)
        writer.write(b"GET / HTTP/1.1\r\n")
        with contextlib.suppress(OSError):
            for _ in range(STRANGER_BYTES // 1_000 + 100):
                writer.write(b"X: " + b"x" * 997 + b"\r\n")
                await writer.drain()
        await is_cut(reader)
        reader, writer = await line(job)
        writer.write(b"POST / HTTP/1.1\r\nContent-Length: 99999999\r\n\r\n" + b"x" * 200_000)
        await is_cut(reader)
        await until(lambda: door_of(job).refusals.total, "a count")

    is_unchanged(tmp_path, script)


def test_what_is_no_request_is_counted_and_told_once_a_minute(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    async def script(job: Led) -> None:
        door = door_of(job)
        for number in range(30):
            reader, writer = await line(job)
            writer.write(b"\0\1\2 nonsense\r\n\r\n" if number % 2 else b"GET / HTTP/9.9.9\r\n\r\n")
            assert (await asyncio.wait_for(reader.read(), WAIT_S)).startswith(b"HTTP/1.0 400")
            reader, writer = await plain(job)
            writer.write(b"GET / HTTP/1.1\r\n\r\n")
            await is_cut(reader)
        await until(lambda: door.refusals.total == 60, "all sixty")
        assert len(told(caplog)) == 1
        job.clock.put_forward(doors.TELL_S + 1)
        await until(lambda: len(told(caplog)) == 2, "the second line")
        second = told(caplog)[1]
        assert "30 failed the TLS handshake" in second or "29 failed the TLS handshake" in second
        assert not [record for record in caplog.records if record.exc_info]

    play(tmp_path, script)


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [text for text in caplog.messages if "refused connections at the leader's port" in text]
