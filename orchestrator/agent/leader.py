"""The leader: the agent that carries the supervisor. Events in, actions out, nothing decided here.

Everything that may change the job's state goes through one queue and one consumer: journalled, then
decided by `step`, then performed.
"""

import asyncio
import hmac
import json
import logging
from collections.abc import Awaitable, Callable
from typing import assert_never

from aiohttp import WSCloseCode, WSMsgType, web

from orchestrator.agent.connections import Connections
from orchestrator.agent.translate import (
    event_of,
    hang_detected,
    health_changed,
    registered,
    step_reached,
)
from orchestrator.contract.actions import (
    Action,
    EndJob,
    GatherEvidence,
    ReplaceAgent,
    StartAttempt,
    StopAttempt,
)
from orchestrator.contract.codec import decode
from orchestrator.contract.events import (
    AgentLost,
    CancelRequested,
    Event,
    JobSubmitted,
    LeaderStarted,
    Tick,
)
from orchestrator.contract.protocol import (
    AGENT_PATH,
    CANCEL_PATH,
    Digest,
    Evidence,
    Exited,
    Gather,
    Leave,
    OfferPort,
    Port,
    Register,
    Report,
    Start,
    Stop,
    Stopped,
    Told,
)
from orchestrator.contract.rundir import RunDir
from orchestrator.errors import BackendError
from orchestrator.seams import Backend, Clock
from orchestrator.supervise.loop import Supervisor
from orchestrator.supervise.watch import Limits, Watch

log = logging.getLogger(__name__)

FAREWELL_S = 5.0
"""For the agents to leave once the job is over."""
JOURNAL_RETRY_S = 1.0
DETECT_S = 0.25
"""Between two looks at the clock."""


class SteadyClock:
    """Unix time that never jumps: the wall clock is read once, at the leader's start."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.offset = clock.now() - clock.monotonic()

    def now(self) -> float:
        return self.offset + self.clock.monotonic()


class Leader:
    def __init__(
        self, supervisor: Supervisor, run_dir: RunDir, token: str, backend: Backend, clock: Clock
    ) -> None:
        job = supervisor.run.job
        assert job is not None
        self.job: JobSubmitted = job
        self.supervisor = supervisor
        self.run_dir = run_dir
        self.token = token
        self.backend = backend
        self.clock = clock
        self.steady = SteadyClock(clock)
        self.events: asyncio.Queue[Event] = asyncio.Queue()
        launch = job.launch
        self.connections = Connections(launch.launch, launch.agent_timeout, clock)
        self.watch: Watch | None = None
        self.hung = False
        self.pending: StartAttempt | None = None
        """An attempt whose first host is still to offer a port."""
        self.ending: EndJob | None = None
        self.over = asyncio.Event()

    # What the world brings in

    async def serve(self, host: str, bind: str, address: str, pid: int) -> EndJob:
        """Lead the job to its end."""
        runner = web.AppRunner(self.application(), access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, bind, 0)
        await site.start()
        port = runner.addresses[0][1]
        self._announce(address, port)
        log.info("leading %s at %s:%s", self.job.launch.job, address, port)
        self._happened(LeaderStarted(at=self.steady.now(), host=host, pid=pid))
        tasks = [asyncio.create_task(self._consume()), asyncio.create_task(self._tick())]
        try:
            done = asyncio.create_task(self.over.wait())
            await asyncio.wait([done, *tasks], return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    task.result()
            assert self.ending is not None
            await self._farewell(self.ending)
            return self.ending
        finally:
            for task in tasks:
                task.cancel()
            await runner.cleanup()

    def _announce(self, address: str, port: int) -> None:
        """Say in the run directory where the leader of this launch is."""
        body = {"launch": self.job.launch.launch, "address": address, "port": port}
        fresh = self.run_dir.leader.with_suffix(".new")
        fresh.write_text(json.dumps(body))
        fresh.replace(self.run_dir.leader)

    def application(self) -> web.Application:
        app = web.Application(middlewares=[self._authenticate])
        app.router.add_get(AGENT_PATH, self._agent)
        app.router.add_post(CANCEL_PATH, self._cancel)
        return app

    @web.middleware
    async def _authenticate(
        self,
        request: web.Request,
        handler: Callable[[web.Request], Awaitable[web.StreamResponse]],
    ) -> web.StreamResponse:
        given = request.headers.get("Authorization", "")
        if not hmac.compare_digest(given.encode(), f"Bearer {self.token}".encode()):
            raise web.HTTPUnauthorized(text="this job's token is needed")
        return await handler(request)

    async def _cancel(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.cancel(str(body.get("by", "somebody")))
        return web.Response(status=202, text="cancelling")

    def cancel(self, by: str) -> None:
        """Stop the ranks at their next checkpoint, and end the job."""
        self._happened(CancelRequested(at=self.steady.now(), by=by))

    async def _agent(self, request: web.Request) -> web.WebSocketResponse:
        ws = web.WebSocketResponse(max_msg_size=0)
        await ws.prepare(request)
        first = await ws.receive()
        register: Report = decode(Report, json.loads(first.data))
        if not isinstance(register, Register) or register.launch != self.job.launch.launch:
            await ws.close(code=WSCloseCode.POLICY_VIOLATION, message=b"not of this launch")
            return ws
        connection, is_new = self.connections.admit(register, ws)
        if is_new:
            self._happened(registered(register, self.steady.now()))
        speaking = asyncio.create_task(self.connections.speak(connection, ws))
        try:
            async for message in ws:
                if message.type is not WSMsgType.TEXT:
                    break
                connection.heard = self.clock.monotonic()
                self._reported(decode(Report, json.loads(message.data)))
        finally:
            speaking.cancel()
            if connection.ws is ws:
                connection.ws = None
        return ws

    def _reported(self, report: Report) -> None:
        match report:
            case Digest():
                self._digest(report)
            case Port():
                self._port_offered(report)
            case Told() | Exited() | Evidence() | Stopped():
                self._happened(event_of(report, self.steady.now()))
            case Register():
                pass
            case _:
                assert_never(report)

    def _digest(self, digest: Digest) -> None:
        if self.watch is None or digest.attempt != self.supervisor.run.attempt:
            return
        progress = self.watch.observe(digest.ranks, self.clock.monotonic())
        if progress is not None:
            self._happened(step_reached(progress, digest.attempt, self.steady.now()))

    # Time

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(DETECT_S)
            at = self.steady.now()
            for silence in self.connections.forget_silent():
                lost = AgentLost(
                    at=at, host=silence.host, why=silence.why, silent_s=silence.silent_s
                )
                self._happened(lost)
            if self.watch is not None:
                self._detect(self.watch, at)
            self._happened(Tick(at=at))

    def _detect(self, watch: Watch, at: float) -> None:
        now, attempt = self.clock.monotonic(), self.supervisor.run.attempt
        for change in watch.health_changes(now):
            self._happened(health_changed(change, attempt, at))
        hang = watch.hang(now)
        if hang is not None and not self.hung:
            self.hung = True
            self._happened(hang_detected(hang, attempt, at))

    # Decide and act

    def _happened(self, event: Event) -> None:
        self.events.put_nowait(event)

    async def _consume(self) -> None:
        while True:
            event = await self.events.get()
            for action in await self._decide(event):
                log.info("%s: %s", type(action).__name__, action.reason)
                await self._perform(action)

    async def _decide(self, event: Event) -> tuple[Action, ...]:
        """Journal and step. A disk that is full stops no training: try until it takes the line."""
        while True:
            try:
                return self.supervisor.feed(event)
            except OSError as exc:
                log.error("the journal cannot be written, trying again: %s", exc)
                await asyncio.sleep(JOURNAL_RETRY_S)

    async def _perform(self, action: Action) -> None:
        match action:
            case StartAttempt():
                self._start_attempt(action)
            case StopAttempt():
                self.watch, self.pending = None, None
                for host in self.supervisor.run.placement:
                    self.connections.order(
                        host, Stop(attempt=action.attempt, grace_s=action.grace_s)
                    )
            case GatherEvidence():
                for host in self.supervisor.run.placement:
                    self.connections.order(
                        host, Gather(attempt=action.attempt, timeout_s=action.timeout_s)
                    )
            case ReplaceAgent():
                await self._replace_agent(action)
            case EndJob():
                self.watch = None
                self.ending = action
                self.over.set()
            case _:
                assert_never(action)

    def _start_attempt(self, action: StartAttempt) -> None:
        self.watch, self.hung, self.pending = None, False, action
        self.connections.order(action.hosts[0], OfferPort(attempt=action.attempt))

    def _port_offered(self, offer: Port) -> None:
        """The first host has a port for torchrun's rendezvous: all hosts start."""
        action, self.pending = self.pending, None
        if action is None or action.attempt != offer.attempt:
            return
        plan = self.job.plan
        first = self.supervisor.run.hosts[action.hosts[0]]
        limits = Limits(hang=self.job.hang_timeout, init=self.job.init_timeout)
        self.watch = Watch(range(plan.world_size), limits, self.clock.monotonic())
        for node_rank, host in enumerate(action.hosts):
            self.connections.order(
                host,
                Start(
                    attempt=action.attempt,
                    node_rank=node_rank,
                    nodes=len(action.hosts),
                    ranks_per_host=plan.ranks_per_host,
                    master_address=first.address,
                    master_port=offer.port,
                    config=str(self.run_dir.trainer_config(self.job.plan_number)),
                    drills=action.drills,
                ),
            )

    async def _replace_agent(self, action: ReplaceAgent) -> None:
        """Ask the backend; that it cannot is found out by the agent's absence."""
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(None, self.backend.replace, self.job.launch, action.host)
        except BackendError as exc:
            log.error("no new agent for %s: %s", action.host, exc)

    async def _farewell(self, ending: EndJob) -> None:
        """Let every agent go, and wait a while until they have."""
        for host in list(self.connections.by_host):
            self.connections.order(host, Leave(reason=ending.reason))
        deadline = self.clock.monotonic() + FAREWELL_S
        while self.connections.open and self.clock.monotonic() < deadline:
            await asyncio.sleep(0.05)
