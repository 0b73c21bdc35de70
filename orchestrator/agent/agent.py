"""The agent of one host: runs attempts as the leader orders, and reports what becomes of them.

It holds no policy. It leaves when the leader says so, and when the leader is gone: then it stops
its ranks first.
"""

import asyncio
import contextlib
import json
import logging
import math
import os
import secrets
import signal
from collections import deque
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, assert_never

import aiohttp

from orchestrator.agent.attempt import Attempt
from orchestrator.agent.fabric import check_fabric
from orchestrator.agent.gathering import gather, look_back, with_last_lines
from orchestrator.agent.probes import Probe, no_probe
from orchestrator.agent.sockets import free_port, listen
from orchestrator.agent.standby import Standby
from orchestrator.agent.torchrun import HostPlace
from orchestrator.agent.whereabouts import Term, leader_of
from orchestrator.contract import exits
from orchestrator.contract.codec import decode, encode_tagged
from orchestrator.contract.datagrams import (
    Beat,
    Datagram,
    DrillFired,
    IntervalChanged,
    Resumed,
    Saved,
    SaveFailed,
)
from orchestrator.contract.findings import Finding
from orchestrator.contract.protocol import (
    AGENT_PATH,
    PULSE_S,
    Checked,
    CheckFabric,
    Digest,
    Evidence,
    Exited,
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
    Stopped,
    Told,
    Warned,
)
from orchestrator.seams import Clock

log = logging.getLogger(__name__)

LEAVE_GRACE_S = 3.0
"""SIGTERM to SIGKILL for ranks whose leader is gone or whose job is over."""
FIND_LEADER_S = 60.0
"""How long a new agent looks for its leader."""
RETRY_S = 0.2
HEARD_S = 5 * PULSE_S
"""A leader that is silent for so long may be gone, with nobody left to order anything."""
STILL_MARGIN_S = 0.02
"""Standing still for just as long as the limit is none yet."""
LATE_S = 0.2
"""An agent that is woken later than this has not had the processor, or its host stood still."""
CLOSE_S = 1.0
LOOK_BACK_S = 3.0
"""For what this host says of itself when a rank of it has ended; meanwhile the others stop."""
HOST_DRILL_S = 0.5
"""Between telling the leader of a host drill and dying of it: the journal is to know."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentConfig:
    place: HostPlace
    token: str
    term: Term
    devices: int
    agent_timeout: float
    findings: tuple[Finding, ...] = ()
    """What is not in order here, found before it registered."""
    patience_s: float = 0.0
    """How long it waits in place for another leader once its own is gone, its ranks stopped."""
    leader_at: str = ""
    """HOST:PORT where a leader may be that `leader.json` does not tell of, or of which it tells
    too late; one of another launch turns this agent away."""
    probe: Probe = no_probe
    """Looks at the host when something broke on it."""


class Agent:
    def __init__(self, config: AgentConfig, environ: Mapping[str, str], clock: Clock) -> None:
        self.config = config
        self.environ = environ
        self.clock = clock
        self.standby = Standby(config.place, environ)
        self.incarnation = secrets.token_hex(8)
        self.attempt: Attempt | None = None
        self.running: asyncio.Task[None] | None = None
        self.looking: asyncio.Task[None] | None = None
        """At this host, where a rank of the attempt has ended."""
        self.told: list[asyncio.Task[None]] = []
        """Of ranks of the attempt that have failed: the leader is being told."""
        self.ended: Stopped | None = None
        """How the last attempt ended here."""
        self.outbox: deque[Report] = deque()
        self.wake = asyncio.Event()
        self.last_heard = clock.monotonic()
        self.still_s = math.inf
        """The leader wants to hear at once of ranks that stand still for so long."""
        self.exit_code: int | None = None
        self.tasks: set[asyncio.Task[None]] = set()
        self.checks: dict[int, Checked | None] = {}
        """What came of each check of the fabric; None while it is under way."""

    async def run(self) -> int:
        """Serve the leader until it lets go, or is gone; the exit code."""
        transport = await listen(self.config.place.socket, self.hear)
        try:
            await self.standby.prepare()
            await self._serve()
        finally:
            await self._stop_attempt(LEAVE_GRACE_S)
            await self.standby.close()
            transport.close()
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
        self._report(Warned(host=self.config.place.host, signal=signal_name))
        self._spawn(self._go_when_idle())

    async def _go_when_idle(self) -> None:
        """Without a leader nobody stops the ranks in good order: they stop now."""
        while self.outbox or self.attempt is not None:
            if self.silent_for() > HEARD_S:
                await self._stop_attempt(LEAVE_GRACE_S)
                break
            await asyncio.sleep(RETRY_S)
        self.leave(exits.LEADER_LOST)

    async def _serve(self) -> None:
        """Keep a connection to the leader; give up when it was silent for too long."""
        patience = max(FIND_LEADER_S, self.config.agent_timeout)
        async with aiohttp.ClientSession() as session:
            while self.exit_code is None:
                leader = leader_of(self.config.place.run_dir, self.config.term)
                if leader.get("over"):
                    log.info("the leader has gone: the job is over")
                    self.exit_code = exits.OK
                    break
                for place in self._places(leader):
                    heard = self.last_heard
                    with contextlib.suppress(aiohttp.ClientError, ConnectionError, TimeoutError):
                        await self._converse(session, f"http://{place}{AGENT_PATH}")
                        if place != self.config.leader_at or self.last_heard > heard:
                            patience = self.config.agent_timeout
                    if self.exit_code is not None or self.last_heard > heard:
                        break
                if self.exit_code is None and self.silent_for() > patience:
                    await self._without_leader(self.silent_for() - patience)
                await asyncio.sleep(RETRY_S)

    def _places(self, leader: Mapping[str, Any]) -> list[str]:
        """Where the leader may be, the likeliest first."""
        told = [f"{leader['address']}:{leader['port']}"] if "port" in leader else []
        return list(dict.fromkeys([*told, *filter(None, [self.config.leader_at])]))

    async def _without_leader(self, alone_s: float) -> None:
        """Stop the ranks; leave, unless another leader may yet come."""
        if self.attempt is not None:
            log.error("no word from the leader for %.1f s: stopping", self.silent_for())
            await self._stop_attempt(LEAVE_GRACE_S)
        if alone_s >= self.config.patience_s:
            log.error("no word from the leader for %.1f s: leaving", self.silent_for())
            self.exit_code = exits.LEADER_LOST

    def silent_for(self) -> float:
        """Seconds since the leader was last heard."""
        return self.clock.monotonic() - self.last_heard

    async def _converse(self, session: aiohttp.ClientSession, url: str) -> None:
        headers = {"Authorization": f"Bearer {self.config.token}"}
        try:
            async with asyncio.timeout(self.config.agent_timeout):
                ws = await session.ws_connect(url, headers=headers, max_msg_size=0)
        except aiohttp.WSServerHandshakeError as exc:
            if exc.status == HTTPStatus.UNAUTHORIZED:
                log.error("the leader refused this agent (%s): %s", exc.status, exc.message)
                # Where a leader's successor has another address, its own may be another job's now.
                if not self.config.patience_s:
                    self.exit_code = exits.NOT_ADMITTED
            return
        both: list[asyncio.Task[None]] = []
        try:
            await self._send(ws, self._register())
            await self._repeat_ends()
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

    def _register(self) -> Register:
        place = self.config.place
        return Register(
            host=place.host,
            address=place.address,
            devices=self.config.devices,
            pid=os.getpid(),
            incarnation=self.incarnation,
            launch=self.config.term.launch,
            sent_at=self.clock.now(),
            findings=self.config.findings,
            running=0 if self.attempt is None else self.attempt.start.attempt,
        )

    async def _repeat_ends(self) -> None:
        """After a reconnection, say again what may have been lost with the old connection."""
        if (attempt := self.attempt) is not None:
            ends = [record.ended for record in attempt.ranks.values() if record.ended is not None]
            failed = [attempt.exited(end) for end in ends if end.exit_code != 0]
            self.outbox.extend(
                await asyncio.gather(*(with_last_lines(attempt, exited) for exited in failed))
            )
        elif self.ended is not None:
            self.outbox.append(self.ended)

    async def _speak(self, ws: aiohttp.ClientWebSocketResponse) -> None:
        """Send reports as they come, and a digest with every pulse."""
        while self.exit_code is None:
            while self.outbox:
                await self._send(ws, self.outbox[0])
                self.outbox.popleft()
            self.wake.clear()
            attempt = self.attempt
            number = attempt.start.attempt if attempt else 0
            ranks = attempt.digest() if attempt else ()
            await self._send(ws, Digest(attempt=number, ranks=ranks))
            await self._rest()

    async def _rest(self) -> None:
        """Until there is something to say: a report, ranks that stand still, or the next digest."""
        due = self.clock.monotonic() + PULSE_S
        while not (self.wake.is_set() or self.exit_code is not None):
            begun, attempt = self.clock.monotonic(), self.attempt
            still_in = attempt.still_in(self.still_s) if attempt else math.inf
            left = min(due - begun, still_in + STILL_MARGIN_S)
            if left <= 0:
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.wake.wait(), left)
            late = self.clock.monotonic() - begun - left
            if attempt is not None and late > LATE_S:
                attempt.excuse(late)

    async def _send(self, ws: aiohttp.ClientWebSocketResponse, report: Report) -> None:
        await ws.send_str(json.dumps(encode_tagged(report)))

    async def _obey(self, ws: aiohttp.ClientWebSocketResponse) -> None:
        while self.exit_code is None:
            try:
                message = await ws.receive(timeout=self.config.agent_timeout)
            except TimeoutError:
                log.warning("no word from the leader for %.1f s", self.silent_for())
                return
            if message.type is not aiohttp.WSMsgType.TEXT:
                return
            self.last_heard = self.clock.monotonic()
            order: Order = decode(Order, json.loads(message.data))
            self._perform(order)

    def _perform(self, order: Order) -> None:
        match order:
            case Pulse(still_s=still_s):
                self.still_s = math.inf if still_s is None else still_s
            case OfferPort():
                port = free_port(self.config.place.address)
                self._report(Port(attempt=order.attempt, port=port))
            case CheckFabric():
                self._spawn(self._check(order))
            case Start():
                self._spawn(self._start(order))
            case Stop():
                self._spawn(self._stop(order))
            case Gather():
                self._spawn(self._gather(order))
            case Leave():
                log.info("leaving: %s", order.reason)
                self.exit_code = exits.OK
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
            self.leave(exits.FAILED)

    def _report(self, report: Report) -> None:
        self.outbox.append(report)
        self.wake.set()

    async def _check(self, order: CheckFabric) -> None:
        """Once for each order, which is said again after a reconnection."""
        if order.check in self.checks:
            self._report_check(self.checks[order.check])
            return
        self.checks[order.check] = None
        self.checks[order.check] = await check_fabric(
            order, self.config.place, self.standby, self.environ, self.clock
        )
        self._report_check(self.checks[order.check])

    def _report_check(self, checked: Checked | None) -> None:
        if checked is not None:
            self._report(checked)

    async def _start(self, order: Start) -> None:
        if self.attempt is not None and self.attempt.start.attempt < order.attempt:
            log.warning("attempt %s is under way, and given up", self.attempt.start.attempt)
            await self._stop_attempt(0.0)
        if self.attempt is not None or (self.ended and self.ended.attempt >= order.attempt):
            return  # said twice
        self.attempt = Attempt(order, self.config.place, self.clock)
        self.looking, self.told = None, []
        self.running = asyncio.create_task(self._run_attempt(self.attempt))
        self.running.add_done_callback(self._worked)

    async def _run_attempt(self, attempt: Attempt) -> None:
        try:
            await attempt.launch(self.standby, self.environ)
            unseen, stopped = await attempt.wait()
        except OSError as exc:
            number, host = attempt.start.attempt, self.config.place.host
            unseen = []
            stopped = Stopped(
                attempt=number, host=host, finished=False, why=f"torchrun could not be run: {exc}"
            )
        for exited in unseen:
            self._failed(exited, attempt)
        await asyncio.gather(*self.told)
        if self.looking is not None:
            await self.looking
        self._remember(stopped)
        self.attempt = None
        log.info(
            "attempt %s: no process left, %s",
            stopped.attempt,
            "all ranks returned 0" if stopped.finished else stopped.why.split("\n")[0],
        )
        self._report(stopped)

    async def _stop(self, order: Stop) -> None:
        host = self.config.place.host
        if order.another:
            self._spawn(self.standby.prepare())
        if self.attempt is not None and self.attempt.start.attempt == order.attempt:
            await self._stop_attempt(order.grace_s)
        elif self.ended is not None and self.ended.attempt == order.attempt:
            self._report(self.ended)
        else:
            # Never begun: remember, so that a Start that comes late is not obeyed.
            stopped = Stopped(attempt=order.attempt, host=host, finished=False)
            self._remember(stopped)
            self._report(stopped)

    def _remember(self, stopped: Stopped) -> None:
        if self.ended is None or self.ended.attempt < stopped.attempt:
            self.ended = stopped

    async def _stop_attempt(self, grace_s: float) -> None:
        if self.attempt is None or self.running is None:
            return
        await self.attempt.stop(grace_s)
        await self.running

    async def _gather(self, order: Gather) -> None:
        attempt = self.attempt
        running = attempt is not None and attempt.start.attempt == order.attempt
        if attempt is not None and running:
            evidence = await gather(attempt, order.timeout_s, self.config.probe)
            # First whether they still stand still: evidence of all hosts has the ranks stopped.
            self._report(Digest(attempt=order.attempt, ranks=attempt.digest()))
            self._report(evidence)
            return
        nothing = {"ranks": "no attempt runs here"}
        host = self.config.place.host
        self._report(Evidence(attempt=order.attempt, host=host, ranks=(), missing=nothing))

    def hear(self, datagram: Datagram) -> None:
        """A rank of this host said something."""
        attempt = self.attempt
        if attempt is None or datagram.attempt != attempt.start.attempt:
            return
        known = attempt.ranks.get(datagram.rank)
        before = known.loss if known else None
        exited = attempt.hear(datagram)
        if exited is not None:
            self._failed(exited, attempt)
        match datagram:
            case Beat() if before is None and datagram.loss is not None:
                self.wake.set()  # the first step of the attempt: the leader waits for it
            case Resumed() | Saved() | SaveFailed() | IntervalChanged():
                self._report(Told(host=self.config.place.host, datagram=datagram))
            case DrillFired():
                self._report(Told(host=self.config.place.host, datagram=datagram))
                self._drill_host(datagram, attempt)
            case _:
                pass

    def _failed(self, exited: Exited, attempt: Attempt) -> None:
        """The first that ended by itself has this host looked at: it may be the host's fault."""
        self.told.append(self._spawn(self._tell_of_end(exited, attempt)))
        if not exited.stopped and self.looking is None:
            self.looking = asyncio.create_task(self._look_back(attempt))

    async def _tell_of_end(self, exited: Exited, attempt: Attempt) -> None:
        self._report(await with_last_lines(attempt, exited))

    async def _look_back(self, attempt: Attempt) -> None:
        """The leader is told of what tells something: a fabric that breaks ends ranks everywhere,
        and most hosts know nothing of it."""
        evidence = await look_back(attempt, LOOK_BACK_S, self.config.probe)
        if evidence.kernel or any(finding.verdict == "stops" for finding in evidence.findings):
            self._report(evidence)

    def _drill_host(self, fired: DrillFired, attempt: Attempt) -> None:
        drill = next((d for d in attempt.start.drills if d.id == fired.drill), None)
        if drill is not None and drill.target == "host":
            log.warning("drill %s: this agent and its ranks die now", drill)
            loop = asyncio.get_running_loop()
            loop.call_later(HOST_DRILL_S, os.kill, os.getpid(), signal.SIGKILL)
