"""Runs the real leader with a real journal on a local port; the test plays its agents."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import aiohttp

from orchestrator.agent.handshake import nonce_in, proof_headers
from orchestrator.contract.codec import decode, encode_tagged
from orchestrator.contract.files.fence import check_leader, take_over
from orchestrator.contract.files.leader_file import Term, leader_of
from orchestrator.contract.files.run_dir import RunDir
from orchestrator.contract.launch import Allocation
from orchestrator.contract.messages.actions import EndJob, Requeue
from orchestrator.contract.messages.agent_protocol import (
    AGENT_PATH,
    CANCEL_PATH,
    Claim,
    Digest,
    OfferPort,
    Order,
    Port,
    Pulse,
    Register,
    Report,
    Start,
)
from orchestrator.contract.messages.events import AgentRegistered, HostStopped, RankExited
from orchestrator.journal.journal import Journal, read
from orchestrator.journal.supervisor import Supervisor
from orchestrator.leader.agent_sessions import AgentSession
from orchestrator.leader.backend_calls import Planners
from orchestrator.leader.leader import DETECT_S, Granted, Leader
from orchestrator.leader.leader_server import PURPOSES
from tests.agent.world import (
    LAUNCH,
    SECRET,
    WAIT_S,
    FakeBackend,
    LoopClock,
    a_job,
    run_with_clock,
    until,
)

T = TypeVar("T")
PIN = aiohttp.Fingerprint(SECRET.fingerprint)
NAME = "the-leader"
SILENT_S = 60.0
"""Silence after which these leaders lose an agent. Agents of a test send nothing by themselves."""
CHECK_S = 2 * DETECT_S
"""Enough time for one more check by the leader, too little to look like a pause of the leader."""


@dataclass
class FakeAgent:
    """The agent of one host, as the leader sees it."""

    host: str
    ws: aiohttp.ClientWebSocketResponse
    pid: int

    async def send(self, *reports: Report) -> None:
        for report in reports:
            await self.ws.send_str(json.dumps(encode_tagged(report)))

    async def register(self, launch: int = LAUNCH) -> None:
        await self.send(
            Register(
                agent=AgentRegistered(
                    host=self.host,
                    address="10.0.0.1",
                    devices=1,
                    pid=self.pid,
                    incarnation=str(self.pid),
                ),
                launch=launch,
                sent_at=time.time(),
            )
        )

    async def next_order(self) -> Order:
        message = await self.ws.receive(timeout=WAIT_S)
        assert message.type is aiohttp.WSMsgType.TEXT, message
        order: Order = decode(Order, json.loads(message.data))
        return order

    async def expect(self, kind: type[T]) -> T:
        """The next order other than a pulse; it must be of this kind."""
        while True:
            order = await self.next_order()
            if isinstance(order, Pulse):
                assert order.launch == LAUNCH
                continue
            assert isinstance(order, kind), order
            return order

    async def wait_closed(self) -> None:
        while (message := await self.ws.receive(timeout=WAIT_S)).type is aiohttp.WSMsgType.TEXT:
            assert isinstance(decode(Order, json.loads(message.data)), Pulse)


@dataclass
class LedJob:
    """A job and its running leader."""

    leader: Leader
    run_dir: RunDir
    session: aiohttp.ClientSession
    url: str
    backend: FakeBackend
    clock: LoopClock
    task: "asyncio.Task[EndJob | Requeue]"
    checks: int = 0
    """How often the leader has checked for silent agents."""

    def events(self, kind: type[T]) -> list[T]:
        return [e.event for e in read(self.run_dir.journal) if isinstance(e.event, kind)]

    async def wait_for_event(self, kind: type[T], count: int = 1) -> T:
        found: T = (await until(lambda: self.events(kind)[count - 1 :], kind.__name__))[0]
        return found

    async def connect(self, host: str, pid: int = 100, launch: int = LAUNCH) -> FakeAgent:
        headers = await self.proof(AGENT_PATH, host=host, incarnation=str(pid), launch=launch)
        ws = await self.session.ws_connect(self.url + AGENT_PATH, headers=headers, ssl=PIN)
        return FakeAgent(host, ws, pid)

    async def proof(self, path: str, launch: int = LAUNCH, **claim: str) -> dict[str, str]:
        """Headers with a proof for the nonce that the leader sent last on this connection."""
        ask = self.session.get if path == AGENT_PATH else self.session.post
        async with ask(self.url + path, ssl=PIN) as answer:
            assert answer.status == 401
            nonce = nonce_in(answer.headers)
            assert nonce
        purpose = PURPOSES[path]
        return proof_headers(SECRET, nonce, Claim(purpose=purpose, launch=launch, **claim))

    async def agent(self, host: str, pid: int = 100) -> FakeAgent:
        agent = await self.connect(host, pid)
        await agent.register()
        return agent

    async def start_both(self, attempt: int = 1) -> tuple[FakeAgent, FakeAgent]:
        """Connect two agents and start an attempt on both."""
        zero, one = await self.agent("host-0"), await self.agent("host-1")
        await start_attempt(zero, one, attempt)
        return zero, one

    async def pass_time(self, *senders: FakeAgent) -> None:
        """Let the leader check once more; `senders` send a digest before it does."""
        connections = self.leader.sessions.by_host
        for agent in senders:
            before = connections[agent.host].heard
            await agent.send(Digest(attempt=0, ranks=()))
            await until(partial(_heard_after, connections[agent.host], before), "its digest")
        checks = self.checks
        self.clock.put_forward(CHECK_S)
        await until(lambda: self.checks > checks, "a check by the leader")

    async def post(self, headers: dict[str, str], body: bytes = b'{"by": "me"}') -> int:
        headers = {"Content-Type": "application/json", **headers}
        url = self.url + CANCEL_PATH
        async with self.session.post(url, data=body, headers=headers, ssl=PIN) as answer:
            return answer.status

    async def request_cancel(
        self, body: bytes = b'{"by": "me"}', kind: str = "application/json"
    ) -> int:
        return await self.post({**await self.proof(CANCEL_PATH), "Content-Type": kind}, body)

    async def end(self) -> EndJob:
        ending = await asyncio.wait_for(self.task, WAIT_S)
        assert isinstance(ending, EndJob)
        return ending


async def start_attempt(first: FakeAgent, second: FakeAgent, attempt: int) -> tuple[Start, Start]:
    assert (await first.expect(OfferPort)).attempt == attempt
    await first.send(Port(attempt=attempt, port=20_000 + attempt))
    return await first.expect(Start), await second.expect(Start)


@contextlib.asynccontextmanager
async def run_leader(
    folder: Path, clock: LoopClock, allocation: Allocation | None = None, **more: Any
) -> AsyncIterator[LedJob]:
    run_dir = RunDir(folder)
    guard = partial(check_leader, run_dir.fence, NAME)
    with Journal(run_dir.journal, clock, guard=guard) as journal:
        supervisor = Supervisor(journal)
        supervisor.feed(a_job(folder, **{"agent_timeout": SILENT_S, **more}))
        backend = FakeBackend()
        take_over(run_dir.fence, NAME)
        own = folder / "own"
        own.mkdir(mode=0o700)
        granted = Granted(term=Term(LAUNCH), allocation=allocation)
        planners = Planners(fewer=backend.replan, less=backend.refit)
        leader = Leader(supervisor, run_dir, SECRET, backend, clock, granted, planners, NAME)
        task = asyncio.create_task(leader.serve("host-0", "127.0.0.1", "127.0.0.1", own))
        async with aiohttp.ClientSession() as session:
            try:
                where = await until(lambda: leader_of(run_dir, Term(LAUNCH)), "leader.json")
                url = f"https://{where['address']}:{where['port']}"
                job = LedJob(leader, run_dir, session, url, backend, clock, task)
                vars(leader)["_look"] = partial(_count_checks, job, leader._look)
                yield job
            finally:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)


def _heard_after(connection: AgentSession, than: float) -> bool:
    return connection.heard > than


def _count_checks(job: LedJob, check: Callable[[], None]) -> None:
    job.checks += 1
    check()


def run_script(folder: Path, script: Callable[[LedJob], Awaitable[T]], **more: Any) -> T:
    async def run(clock: LoopClock) -> T:
        async with run_leader(folder, clock, **more) as job:
            return await asyncio.wait_for(script(job), WAIT_S)

    return run_with_clock(run)


def exited(rank: int, host: str, attempt: int = 1) -> RankExited:
    return RankExited(attempt=attempt, rank=rank, host=host, exit_code=None, signal=9)


def stopped(host: str, attempt: int = 1, finished: bool = False) -> HostStopped:
    return HostStopped(attempt=attempt, host=host, finished=finished)
