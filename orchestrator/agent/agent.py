"""The agent of one host: has attempts run as the leader orders, and reports what becomes of them.

It holds no policy. It leaves when the leader says so, and when the leader is gone: then it stops
its ranks first.
"""

import asyncio
import contextlib
import logging
import math
import os
import secrets
import signal
from collections import deque
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, assert_never

import aiohttp

from orchestrator.agent.attempts import Attempts
from orchestrator.agent.connection import Connector, Line, NotAdmitted, WebSockets, WrongLeader
from orchestrator.agent.host_processes import HostProcesses, Processes
from orchestrator.agent.processes.fork_server_client import Standby
from orchestrator.agent.processes.torchrun import HostPlace, with_defaults
from orchestrator.agent.storage import AgentFiles, AgentStorage
from orchestrator.contract.check_results import Finding
from orchestrator.contract.files import exit_codes
from orchestrator.contract.files.leader_file import Term
from orchestrator.contract.messages import wire
from orchestrator.contract.messages.agent_protocol import (
    PULSE_S,
    Checked,
    CheckFabric,
    Claim,
    Gather,
    Leave,
    OfferPort,
    Order,
    Port,
    Pulse,
    Register,
    Report,
    Start,
    Stop,
)
from orchestrator.contract.messages.events import AgentRegistered, HostLeaving
from orchestrator.health.clocks_and_names import NAME_S, looked_up
from orchestrator.health.host_probes import Probe, no_probe
from orchestrator.job_secret import JobSecret
from orchestrator.posix.retry_io import TAKE_OVER_S
from orchestrator.seams import Clock, Worker

log = logging.getLogger(__name__)

WARNINGS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""What a scheduler sends, to ranks and agents alike, before it takes hosts back."""
LEAVE_GRACE_S = 3.0
"""SIGTERM to SIGKILL for ranks whose leader is gone or whose job is over."""
FIND_LEADER_S = 60.0
"""For a leader that was started at the same time, by the same hand."""
LOCK_WAIT_S = 60.0
"""Time for a former agent of this host and its ranks to exit."""
FIND_ALLOCATED_S = LOCK_WAIT_S + TAKE_OVER_S + 120.0
"""Time to find a leader in an allocation: that wait, the leader's wait for the journal, and two
minutes for its interpreter and its host check on a cold file server."""
RETRY_S = 0.2
HEARD_S = 5 * PULSE_S
"""A leader that is silent for so long may be gone, with nobody left to order anything."""
STILL_MARGIN_S = 0.02
"""Standing still for just as long as the limit is none yet."""
LATE_S = 0.2
"""An agent that is woken later than this has not had the processor, or its host stood still."""
LISTEN_S = 1.0
"""How long an agent listens before it looks whether it stood still itself."""
CLOSE_S = 1.0
ENDED_S = 2.0
"""Silence of a leader whose process seems to have ended, before that is looked into."""
REFUSALS = 3
"""In a row, after which the leader does not know this agent's secret."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentConfig:
    place: HostPlace
    secret: JobSecret
    term: Term
    devices: int
    agent_timeout: float
    findings: tuple[Finding, ...] = ()
    """What is not in order here, found before it registered."""
    find_leader_s: float = FIND_LEADER_S
    """How long it looks for its leader when it is new."""
    patience_s: float = 0.0
    """How long it waits in place for another leader once its own is gone, its ranks stopped."""
    outlives_leader: bool = False
    """It stays when its leader is gone, its ranks stopped: another agent of the run, or this very
    one, leads from then on (`failover/takeover.py`)."""
    leader_at: str = ""
    """HOST:PORT where a leader may be that `leader.json` does not tell of, or of which it tells
    too late; one of another launch turns this agent away."""
    probe: Probe = no_probe
    """Looks at the host when something broke on it."""


@dataclass(frozen=True, slots=True)
class AgentSeams:
    """What an agent uses of the world outside it."""

    connector: Connector
    storage: AgentStorage
    processes: Processes
    worker: Worker = asyncio.to_thread


class Agent:
    def __init__(
        self,
        config: AgentConfig,
        environ: Mapping[str, str],
        clock: Clock,
        standby: Standby | None = None,
        seams: AgentSeams | None = None,
    ) -> None:
        """`seams`: the real ones where it is left out."""
        self.config = config
        self.environ = with_defaults(environ)
        self.clock = clock
        self.standby = standby or Standby(config.place, self.environ)
        self.probe = config.probe
        seams = seams or self._real_seams()
        self.connector, self.storage = seams.connector, seams.storage
        self.processes, self.worker = seams.processes, seams.worker
        self.incarnation = secrets.token_hex(8)
        self.outbox: deque[Report] = deque()
        self.wake = asyncio.Event()
        self.attempts = Attempts(
            config.place.host,
            self.processes,
            clock,
            report=self._report,
            hurry=self.wake.set,
            spawn=self._spawn,
        )
        self.last_heard = clock.monotonic()
        self.still_s = math.inf
        """The leader wants to hear at once of ranks that stand still for so long."""
        self.looked_up = ("", "")
        """Name and address of the leader's host for which that was done last, …"""
        self.leader_name: Finding | None = None
        """… and what was not in order."""
        self.refusals = 0
        """In a row."""
        self.unserved = False
        """On the leader's host, which answers, no process listens where it did."""
        self.alone = asyncio.Event()
        """No leader was heard for too long, and no rank is left here."""
        self.unheeded = ""
        """The last signal of a scheduler since a leader was heard, which that has had as well."""
        self.exit_code: int | None = None
        self.tasks: set[asyncio.Task[None]] = set()
        self.checks: dict[int, Checked | None] = {}
        """What came of each check of the fabric; None while it is under way."""

    def _real_seams(self) -> AgentSeams:
        place = self.config.place
        processes = HostProcesses(place, self.environ, self.clock, self.standby, lambda: self.probe)
        return AgentSeams(WebSockets(self.config.secret), AgentFiles(place.run_dir), processes)

    async def run(self) -> int:
        """Serve the leader until it lets go, or is gone; the exit code."""
        try:
            await self.processes.open(self.attempts.hear)
            await self._serve()
        finally:
            await self.attempts.end(LEAVE_GRACE_S)
            await self.processes.close()
            for task in self.tasks:
                task.cancel()
        assert self.exit_code is not None
        return self.exit_code

    def leave(self, exit_code: int) -> None:
        self.exit_code = exit_code
        self.wake.set()

    def warned(self, signal_name: str) -> None:
        """The scheduler ends this agent alone: tell the leader, and go when no rank is left."""
        log.warning("%s: this host has to go", signal_name)
        self._report(HostLeaving(host=self.config.place.host, why=signal_name))
        self._spawn(self._go_when_idle())

    async def _go_when_idle(self) -> None:
        """Without a leader nobody stops the ranks in good order: they stop now."""
        while self.outbox or self.attempts.attempt is not None:
            if self.silent_for() > HEARD_S:
                await self.attempts.end(LEAVE_GRACE_S)
                break
            await asyncio.sleep(RETRY_S)
        self.leave(exit_codes.LEADER_LOST)

    async def _serve(self) -> None:
        """Keep a connection to the leader; give up when it was silent for too long."""
        patience = max(self.config.find_leader_s, self.config.agent_timeout)
        async with self.connector:
            while self.exit_code is None:
                leader = self.storage.leader_of(self.config.term)
                if leader.get("over"):
                    log.info("the leader has gone: the job is over")
                    self.exit_code = exit_codes.OK
                    break
                await self._look_up(leader)
                for place in self._places(leader):
                    heard = self.last_heard
                    with contextlib.suppress(aiohttp.ClientError, ConnectionError, TimeoutError):
                        await self._try_to_converse(place)
                        if place != self.config.leader_at or self.last_heard > heard:
                            patience = self.config.agent_timeout
                    if self.exit_code is not None or self.last_heard > heard:
                        break
                if self.exit_code is None and (
                    self.silent_for() > patience or await self._leader_has_ended()
                ):
                    await self._without_leader(self.silent_for() - patience)
                await asyncio.sleep(RETRY_S)

    async def _look_up(self, leader: Mapping[str, Any]) -> None:
        """Its host by its name, once: the leader does so with this one's when it registers."""
        named = (leader.get("name", ""), leader.get("address", ""))
        if named == self.looked_up or not all(named):
            return
        self.looked_up = named
        patience_s = min(NAME_S, self.config.agent_timeout / 2)
        self.leader_name = await looked_up(*named, self.config.place.host, patience_s)

    def _places(self, leader: Mapping[str, Any]) -> list[str]:
        """Where the leader may be, the likeliest first."""
        told = [f"{leader['address']}:{leader['port']}"] if "port" in leader else []
        return list(dict.fromkeys([*told, *filter(None, [self.config.leader_at])]))

    async def _without_leader(self, alone_s: float) -> None:
        """Stop the ranks; leave, unless another leader may yet come."""
        if self.attempts.attempt is not None:
            log.error("no word from the leader for %.1f s: stopping", self.silent_for())
            await self.attempts.end(LEAVE_GRACE_S, alone_since=self.last_heard)
        if self.config.outlives_leader:
            if not self.alone.is_set():
                log.error("no word from the leader for %.1f s: looking after it", self.silent_for())
            self.alone.set()
        elif alone_s >= self.config.patience_s:
            log.error("no word from the leader for %.1f s: leaving", self.silent_for())
            self.exit_code = exit_codes.LEADER_LOST

    async def _leader_has_ended(self) -> bool:
        """Whether its process is surely gone, so that nobody need wait for it: its port is closed,
        and the kernel has let go of the journal that it held."""
        if not self.config.outlives_leader or not self.unserved or self.silent_for() < ENDED_S:
            return False
        try:
            return not await self.worker(self.storage.leader_holds_journal)
        except OSError:  # a file system without locks says nothing
            return False

    def silent_for(self) -> float:
        """Seconds since the leader was last heard."""
        return self.clock.monotonic() - self.last_heard

    async def _try_to_converse(self, place: str) -> None:
        self.unserved = False
        claim = Claim(
            purpose="agent",
            launch=self.config.term.launch,
            host=self.config.place.host,
            incarnation=self.incarnation,
        )
        try:
            async with asyncio.timeout(self.config.agent_timeout):
                ws = await self.connector.connect(place, claim)
        except WrongLeader:
            log.warning("%s is not this job's leader: its certificate is another", place)
        except NotAdmitted as exc:
            self._refused(exc)
        except ConnectionRefusedError:
            self.unserved = True
            raise
        else:
            await self._converse(ws)

    async def _converse(self, ws: Line) -> None:
        self.refusals = 0
        both: list[asyncio.Task[None]] = []
        try:
            await self._send(ws, self._register())
            again = await self.attempts.ends()
            former = self.attempts.ended  # it may still be to be said, with what it was about then
            self.outbox = deque(report for report in self.outbox if report is not former)
            self.outbox.extend(again)
            both += [asyncio.create_task(self._speak(ws)), asyncio.create_task(self._obey(ws))]
            done, _ = await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in both:
                task.cancel()
            await asyncio.gather(*both, return_exceptions=True)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_S):  # a leader that is gone does not answer
                    await ws.close()

    def _refused(self, exc: NotAdmitted) -> None:
        """Once may be by chance: a connection that broke between question and proof."""
        log.error("the leader refused this agent: %s", exc)
        self.refusals += 1
        if self.refusals >= REFUSALS and not self.config.patience_s:
            self.exit_code = exit_codes.NOT_ADMITTED

    def _register(self) -> Register:
        place = self.config.place
        registered = AgentRegistered(
            host=place.host,
            address=place.address,
            devices=self.config.devices,
            pid=os.getpid(),
            incarnation=self.incarnation,
            findings=(*self.config.findings, *filter(None, [self.leader_name])),
            running=self.attempts.number,
        )
        return Register(agent=registered, launch=self.config.term.launch, sent_at=self.clock.now())

    async def _speak(self, ws: Line) -> None:
        """Send reports as they come, and a digest with every pulse."""
        while self.exit_code is None:
            while self.outbox:
                await self._send(ws, self.outbox[0])
                self.outbox.popleft()
            self.wake.clear()
            await self._send(ws, self.attempts.digest())
            await self._rest()

    async def _rest(self) -> None:
        """Until there is something to say: a report, ranks that stand still, or the next digest."""
        due = self.clock.monotonic() + PULSE_S
        while not (self.wake.is_set() or self.exit_code is not None):
            begun, attempt = self.clock.monotonic(), self.attempts.attempt
            still_in = attempt.still_in(self.still_s) if attempt else math.inf
            left = min(due - begun, still_in + STILL_MARGIN_S)
            if left <= 0:
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):  # cheaper than `wait_for`: no task
                    await self.wake.wait()
            late = self.clock.monotonic() - begun - left
            if attempt is not None and late > LATE_S:
                attempt.excuse(late)

    async def _send(self, ws: Line, report: Report) -> None:
        await ws.send_str(wire.encode(report).decode())

    async def _obey(self, ws: Line) -> None:
        while self.exit_code is None:
            message = await self._next_order(ws)
            if message is None:
                log.warning("no word from the leader for %.1f s", self.silent_for())
                return
            if message.type is not aiohttp.WSMsgType.TEXT:
                return
            self.last_heard = self.clock.monotonic()
            self.alone.clear()
            self.unheeded = ""
            order: Order = wire.decode(Order, message.data.encode())
            self._perform(order)

    async def _next_order(self, ws: Line) -> aiohttp.WSMessage | None:
        """None when the leader was silent for longer than `agent_timeout`.

        The time in which this agent stood still itself does not count. `scontrol suspend` stops all
        agents of a job, the leader's among them: on `resume` each of them has an overdue timer, and
        the words of the others are in its socket.
        """
        receiving = asyncio.ensure_future(ws.receive())
        left = self.config.agent_timeout
        try:
            while left > 0:
                begun, listen_s = self.clock.monotonic(), min(left, LISTEN_S)
                done, _ = await asyncio.wait({receiving}, timeout=listen_s)
                late = self.clock.monotonic() - begun - listen_s
                if late > LATE_S:
                    log.warning("this agent stood still for %.1f s", late)
                    self.last_heard += late
                if done:
                    return receiving.result()
                left -= listen_s
            return None
        finally:
            receiving.cancel()

    def _perform(self, order: Order) -> None:
        match order:
            case Pulse(still_s=still_s):
                self.still_s = math.inf if still_s is None else still_s
            case OfferPort():
                port = self.processes.free_port()
                self._report(Port(attempt=order.attempt, port=port))
            case CheckFabric():
                self._spawn(self._check(order))
            case Start():
                self._spawn(self.attempts.start(order))
            case Stop():
                self._spawn(self.attempts.stop(order))
            case Gather():
                self._spawn(self.attempts.gather(order))
            case Leave():
                log.info("leaving: %s", order.reason)
                self.exit_code = exit_codes.REQUEUED if order.again else exit_codes.OK
            case _:
                assert_never(order)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self._worked)
        return task

    def _worked(self, task: asyncio.Task[None]) -> None:
        """A defect here must not look like a rank that is silent: the leader is to see us go."""
        self.tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.critical("this agent has a defect: leaving", exc_info=task.exception())
            self.leave(exit_codes.FAILED)

    def _report(self, report: Report) -> None:
        self.outbox.append(report)
        self.wake.set()

    async def _check(self, order: CheckFabric) -> None:
        """Once for each order, which is said again after a reconnection."""
        if order.check in self.checks:
            self._report_check(self.checks[order.check])
            return
        self.checks[order.check] = None
        self.checks[order.check] = await self.processes.check_fabric(order)
        self._report_check(self.checks[order.check])

    def _report_check(self, checked: Checked | None) -> None:
        if checked is not None:
            self._report(checked)
