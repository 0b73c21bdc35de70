"""What the leader's port costs while all agents of a large job connect at the same time.

    python -m benchmarks.door [AGENTS]

The TLS port and the leader's server are the real ones. A few helper processes open the connections
as agents do, over loopback, each with a registration and an answer. The same over plain HTTP with a
header is measured for comparison. CPU seconds are those of the leader's process.
"""

import asyncio
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import aiohttp
from aiohttp import web

from benchmarks.measure.timing import machine
from orchestrator.agent.connection import Line
from orchestrator.agent.handshake import nonce_in, proof_headers
from orchestrator.contract.codec import encode_tagged
from orchestrator.contract.messages.agent_protocol import (
    AGENT_PATH,
    Claim,
    ProfileWish,
    Pulse,
    RankProfiles,
    RankStacks,
    Register,
)
from orchestrator.contract.messages.events import AgentRegistered
from orchestrator.errors import JobError
from orchestrator.job_secret import draw, secret_from
from orchestrator.leader.agent_sessions import report_in
from orchestrator.leader.leader_server import LeaderServer, Questions
from orchestrator.posix.fd_limit import allow_files

AGENTS = 2_048
HELPERS = 4
TIMEOUT_S = 120.0
PULSE = json.dumps(encode_tagged(Pulse(launch=1)))
Lines = list[web.WebSocketResponse]


def register(host: str) -> Register:
    agent = AgentRegistered(host=host, address="127.0.0.1", devices=8, pid=1, incarnation=host)
    return Register(agent=agent, launch=1, sent_at=0.0)


# A helper: many agents in one process


async def one(
    session: aiohttp.ClientSession, url: str, secret_path: str, host: str, tls: bool
) -> aiohttp.ClientWebSocketResponse:
    """An agent's way in, with a session of its own, as each agent has."""
    while True:
        try:
            if tls:
                secret = secret_from(await asyncio.to_thread(Path(secret_path).read_text))
                pin = aiohttp.Fingerprint(secret.fingerprint)
                async with session.get(url, ssl=pin) as answer:
                    nonce = nonce_in(answer.headers) or ""
                claim = Claim(purpose="agent", launch=1, host=host, incarnation=host)
                headers = proof_headers(secret, nonce, claim)
                ws = await session.ws_connect(url, headers=headers, ssl=pin)
            else:
                ws = await session.ws_connect(url, headers={"Authorization": "Bearer x"})
            await ws.send_str(json.dumps(encode_tagged(register(host))))
            await ws.receive()
        except (aiohttp.ClientError, OSError) as exc:
            sys.stderr.write(f"{exc!r}\n")
            await asyncio.sleep(0.2)  # as an agent does
        else:
            return ws


async def help_out(url: str, secret: str, first: int, count: int, tls: bool) -> None:
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.readline()
    sessions = [aiohttp.ClientSession() for _ in range(count)]
    await asyncio.gather(
        *(one(sessions[n], url, secret, f"host-{first + n}", tls) for n in range(count))
    )
    await asyncio.to_thread(sys.stdin.readline)


# The leader


async def plain(admitted: Lines) -> tuple[web.AppRunner, str]:
    async def agent(request: web.Request) -> web.WebSocketResponse:
        if request.headers.get("Authorization") != "Bearer x":
            raise web.HTTPUnauthorized
        ws = web.WebSocketResponse(max_msg_size=0)
        await ws.prepare(request)
        report_in(await ws.receive())
        await serve(ws, admitted)
        return ws

    app = web.Application()
    app.router.add_get(AGENT_PATH, agent)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=4_096).start()
    return runner, f"http://127.0.0.1:{runner.addresses[0][1]}{AGENT_PATH}"


async def serve(ws: web.WebSocketResponse, admitted: Lines) -> None:
    admitted.append(ws)
    await ws.send_str(PULSE)
    async for _ in ws:
        pass


async def take_stacks() -> RankStacks:
    raise JobError("no ranks run")


async def profile(wish: ProfileWish) -> RankProfiles:
    raise JobError("no ranks run")


QUESTIONS = Questions(stacks=take_stacks, profiles=profile)


async def measure(agents: int, tls: bool) -> None:
    admitted: Lines = []
    with tempfile.TemporaryDirectory() as folder:
        secret = Path(folder) / "token"
        secret.write_text(draw())
        reception = runner = None
        if tls:

            async def listen(_: Register, ws: Line) -> None:
                assert isinstance(ws, web.WebSocketResponse)
                await serve(ws, admitted)

            reception = LeaderServer(secret_from(secret.read_text()), 1, listen, print, QUESTIONS)
            port = await reception.open("127.0.0.1", 0, Path(folder))
            url = f"https://127.0.0.1:{port}{AGENT_PATH}"
        else:
            runner, url = await plain(admitted)
        helpers = await asyncio.gather(
            *(start(url, secret, n, agents // HELPERS, tls) for n in range(HELPERS))
        )
        for helper in helpers:
            await helper.stdout.readline()  # type: ignore[union-attr]
        before_kib, begun, cpu = rss_kib(), time.perf_counter(), time.process_time()
        longest = 0.0
        for helper in helpers:
            helper.stdin.write(b"go\n")  # type: ignore[union-attr]
        while len(admitted) < agents and time.perf_counter() - begun < TIMEOUT_S:
            looked = time.perf_counter()
            await asyncio.sleep(0.01)
            longest = max(longest, time.perf_counter() - looked - 0.01)
        took, cpu = time.perf_counter() - begun, time.process_time() - cpu
        grown = rss_kib() - before_kib
        what = "TLS and proof" if tls else "plain, a header"
        print(
            f"{what}: {len(admitted)} of {agents} agents in {took:.2f} s;"
            f" {cpu:.2f} s of the leader's CPU, {1e3 * cpu / agents:.2f} ms each;"
            f" {grown / 1024:.0f} MiB; its loop stood still for {longest:.2f} s at most"
        )
        print(f"    {sum_helpers(helpers)}")
        for helper in helpers:
            helper.kill()
            await helper.wait()
        if reception is not None:
            if reception.door is not None and reception.door.refusals.total:
                print(f"    turned away: {reception.door.refusals.total}")
            await reception.close()
        if runner is not None:
            await runner.cleanup()


def sum_helpers(helpers: list[asyncio.subprocess.Process]) -> str:
    ticks = 0
    for helper in helpers:
        fields = Path(f"/proc/{helper.pid}/stat").read_text().rsplit(")", 1)[1].split()
        ticks += int(fields[11]) + int(fields[12])
    return f"the helpers' CPU, with their start: {ticks / 100:.1f} s"


async def start(
    url: str, secret: Path, number: int, count: int, tls: bool
) -> asyncio.subprocess.Process:
    words = ("help", url, str(secret), str(number * count), str(count), str(int(tls)))
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks.door", *words),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )


def rss_kib() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main(argv: list[str]) -> None:
    allow_files()
    if argv[:1] == ["help"]:
        url, secret, first, count, tls = argv[1:]
        asyncio.run(help_out(url, secret, int(first), int(count), tls == "1"))
        return
    agents = int(argv[0]) if argv else AGENTS
    print(machine())
    asyncio.run(measure(agents, tls=False))
    asyncio.run(measure(agents, tls=True))


if __name__ == "__main__":
    main(sys.argv[1:])
