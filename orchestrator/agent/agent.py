"""The agent of one host: it carries out the leader's orders and reports what its ranks do.

It makes no decisions about the job. It exits when the leader orders that. When it loses the leader,
it stops its ranks and exits, or stays if another leader may follow.
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
from typing import Any, assert_never

import aiohttp
from msgspec import Struct
from msgspec.structs import replace

from orchestrator.agent.attempts import Attempts
from orchestrator.agent.connection import Connector, Line, NotAdmitted, WebSockets, WrongLeader
from orchestrator.agent.host_processes import HostProcesses, Processes
from orchestrator.agent.memory.host_copies import HostCopies, Where
from orchestrator.agent.processes.fork_server_client import Standby
from orchestrator.agent.processes.torchrun import HostPlace, with_defaults
from orchestrator.agent.storage import AgentFiles, AgentStorage
from orchestrator.contract.check_results import Finding
from orchestrator.contract.files import exit_codes
from orchestrator.contract.files.leader_file import Term
from orchestrator.contract.memory.peers import OfferSlots
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
    Prepare,
    ProfileRanks,
    Pulse,
    Register,
    Report,
    Save,
    Start,
    Stop,
)
from orchestrator.contract.messages.events import AgentRegistered, HostLeaving, HostWarned
from orchestrator.health.clocks_and_names import NAME_S, looked_up
from orchestrator.health.host_probes import Probe, no_probe
from orchestrator.health.host_warnings import WATCH_LIMIT_S, WATCH_S, Warned, Watch
from orchestrator.job_secret import JobSecret
from orchestrator.posix.retry_io import TAKE_OVER_S
from orchestrator.posix.run_with_timeout import within
from orchestrator.seams import Clock, Worker

log = logging.getLogger(__name__)
ORDERS = wire.Decoder(Order)

WARNINGS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that a scheduler sends, to ranks and agents alike, before it takes hosts back."""
LEAVE_GRACE_S = 3.0
"""From SIGTERM to SIGKILL for ranks whose leader is gone or whose job is over."""
FIND_LEADER_S = 60.0
"""Limit to find a leader that was started at the same time as the agent."""
LOCK_WAIT_S = 60.0
"""Time for a former agent of this host and its ranks to exit."""
FIND_ALLOCATED_S = LOCK_WAIT_S + TAKE_OVER_S + 120.0
"""Time to find a leader in an allocation: that wait, the leader's wait for the journal, and two
minutes for its interpreter and its host check on a cold file server."""
RETRY_S = 0.2
HEARD_S = 5 * PULSE_S
"""A leader that is silent for longer may be gone, so no order may ever come."""
STILL_MARGIN_S = 0.02
"""The digest is sent this much after the limit, so that it reports more than the limit."""
LATE_S = 0.2
"""If a timer fires later than this, the agent had no processor or its host was suspended."""
LISTEN_S = 1.0
"""How often a listening agent checks whether it was suspended itself."""
CLOSE_S = 1.0
ENDED_S = 2.0
"""Silence after which the agent checks whether the leader's process has ended."""
REFUSALS = 3
"""Refusals in a row after which the agent concludes that it has the wrong secret."""


class AgentConfig(Struct, frozen=True, kw_only=True):
    place: HostPlace
    secret: JobSecret
    term: Term
    devices: int
    agent_timeout: float
    scheduled: bool = False
    """A scheduler started this agent, and sends it signals. Else a person does, to end it."""
    findings: tuple[Finding, ...] = ()
    """Problems of this host that were found before the agent registered."""
    boot: str = ""
    """The kernel's id of the last boot of this host; empty if that is not known."""
    former_stopped: bool = False
    """This agent found the host's former one stopped by a signal, and killed it."""
    find_leader_s: float = FIND_LEADER_S
    """How long a new agent looks for its leader."""
    patience_s: float = 0.0
    """How long it waits for another leader after its own is gone and its ranks are stopped."""
    outlives_leader: bool = False
    """It stops its ranks but stays when its leader is gone, because this agent or another one of
    the job then becomes the leader (`failover/takeover.py`)."""
    leader_at: str = ""
    """HOST:PORT to try besides the one in `leader.json`, which may be missing or stale. A leader
    of another launch refuses this agent."""
    probe: Probe = no_probe
    """Checks the host when something broke on it."""
    watch: Watch | None = None
    """Looks now and then for signs that the host will fail."""


class AgentSeams(Struct, frozen=True):
    """The interfaces through which an agent reaches the network, storage, processes, threads."""

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
        """
        Args:
            seams: None uses the real ones.
        """
        self.config = config
        self.environ = with_defaults(environ)
        self.clock = clock
        self.standby = standby or Standby(config.place, self.environ)
        self.probe = config.probe
        self.incarnation = secrets.token_hex(8)
        seams = seams or self._real_seams()
        self.connector, self.storage = seams.connector, seams.storage
        self.processes, self.worker = seams.processes, seams.worker
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
        """The leader wants a digest at once when the ranks have made no progress for so long."""
        self.looked_up = ("", "")
        """Name and address of the leader's host for the last lookup, ..."""
        self.leader_name: Finding | None = None
        """... and the problem that it found."""
        self.refusals = 0
        """In a row."""
        self.unserved = False
        """The leader's host refused the connection: no process listens at the leader's port."""
        self.alone = asyncio.Event()
        """The leader was silent for too long, and no rank is left here."""
        self.unheeded = ""
        """The last signal of a scheduler since the leader was last heard. The leader's host got it
        as well, but no leader has acted on it."""
        self.exit_code: int | None = None
        self.warnings: dict[str, tuple[HostWarned, float]] = {}
        """Problem -> the last warning of it and when it was noticed, to repeat after a
        reconnection."""
        self.tasks: set[asyncio.Task[None]] = set()
        self.checks: dict[int, Checked | None] = {}
        """The result of each all-reduce check; None while the check is running."""

    def _real_seams(self) -> AgentSeams:
        place = self.config.place
        processes = HostProcesses(
            place, self.environ, self.clock, self.standby, lambda: self.probe, self._memory
        )
        return AgentSeams(WebSockets(self.config.secret), AgentFiles(place.run_dir), processes)

    def _memory(self) -> HostCopies:
        place = self.config.place
        claim = Claim(
            purpose="memory",
            launch=self.config.term.launch,
            host=place.host,
            incarnation=self.incarnation,
        )
        secret, folder = self.config.secret, place.socket.parent
        return HostCopies(Where(address=place.address, folder=folder, secret=secret, claim=claim))

    async def run(self) -> int:
        """Serve the leader until it releases this agent or is gone. Returns the exit code."""
        try:
            await self.processes.open(self.attempts.hear)
            if self.config.watch is not None:
                self._spawn(self._watch_host(self.config.watch))
            await self._serve()
        finally:
            # The ranks end first, because closing the processes kills the fork server and, with it,
            # every rank at once.
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
        """The scheduler ends this agent alone: tell the leader, and exit when no rank is left."""
        log.warning("the scheduler takes this host back: %s", signal_name)
        self._report(HostLeaving(host=self.config.place.host, why=signal_name))
        self._spawn(self._go_when_idle())

    async def _watch_host(self, watch: Watch) -> None:
        """Report what this host warns of."""
        while True:
            try:
                found = await within(WATCH_LIMIT_S, watch, self.clock.monotonic())
            except TimeoutError:
                log.warning("this host is not watched any more: a driver hangs")
                return  # another look would hang too
            except Exception:
                # Training needs no watch. Any other task that fails ends the agent, and with it the
                # ranks of a host that may be healthy.
                log.exception("this host is not watched any more")
                return
            for one in found:
                self.warn(one)
            await asyncio.sleep(WATCH_S)

    def warn(self, found: Warned) -> None:
        """Tell the leader what is wrong with this host."""
        log.warning("this host warns (%s): %s", found.kind, found.what)
        host, what = self.config.place.host, found.what
        self._report(HostWarned(host=host, problem=found.kind, what=what, lasts=found.lasts))

    async def _go_when_idle(self) -> None:
        # The leader must hear first that this host leaves, and how its ranks ended.
        while self.outbox or self.attempts.attempt is not None:
            # Normally the leader lets the ranks save a checkpoint and then stops them. If it is
            # gone, no order will come, so the agent stops its ranks itself.
            if self.silent_for() > HEARD_S:
                await self.attempts.end(LEAVE_GRACE_S)
                break
            await asyncio.sleep(RETRY_S)
        self.leave(exit_codes.LEADER_LOST)

    async def _serve(self) -> None:
        """Keep a connection to the leader; give up when it was silent for too long."""
        # Before the first contact the leader may still be starting, so allow more time.
        patience = max(self.config.find_leader_s, self.config.agent_timeout)
        async with self.connector:
            while self.exit_code is None:
                leader = self.storage.leader_of(self.config.term)
                # The job ended while this agent was not connected. No order to leave will come.
                if leader.get("over"):
                    log.info("the leader has exited: the job is over")
                    self.exit_code = exit_codes.OK
                    break
                await self._look_up(leader)
                for place in self._places(leader):
                    heard = self.last_heard
                    with contextlib.suppress(aiohttp.ClientError, ConnectionError, TimeoutError):
                        await self._try_to_converse(place)
                        # A place from `leader.json` had a leader, so from now on silence means
                        # that it is lost. `leader_at` is only a guess until a leader is heard.
                        if place != self.config.leader_at or self.last_heard > heard:
                            patience = self.config.agent_timeout
                    # A leader was heard here. The next round starts with `leader.json` again.
                    if self.exit_code is not None or self.last_heard > heard:
                        break
                # The order to leave came on the line that has just ended. Then nothing is lost.
                if self.exit_code is None and (
                    self.silent_for() > patience or await self._leader_has_ended()
                ):
                    await self._without_leader(self.silent_for() - patience)
                await asyncio.sleep(RETRY_S)

    async def _look_up(self, leader: Mapping[str, Any]) -> None:
        """Check once that the name of the leader's host resolves to its address. The leader checks
        the name of this host when the agent registers."""
        named = (leader.get("name", ""), leader.get("address", ""))
        # A leader writes no name where names do not resolve. A known name is not looked up at each
        # reconnection.
        if named == self.looked_up or not all(named):
            return
        self.looked_up = named
        # A name server that does not respond must not use up the time in which the leader counts
        # this agent as lost.
        patience_s = min(NAME_S, self.config.agent_timeout / 2)
        self.leader_name = await looked_up(*named, self.config.place.host, patience_s)

    def _places(self, leader: Mapping[str, Any]) -> list[str]:
        """HOST:PORT where the leader may listen, the most likely first."""
        from_file = [f"{leader['address']}:{leader['port']}"] if "port" in leader else []
        return list(dict.fromkeys([*from_file, *filter(None, [self.config.leader_at])]))

    async def _without_leader(self, alone_s: float) -> None:
        """Stop the ranks. Then exit, unless another leader may follow.

        Args:
            alone_s: seconds since the limit for the leader's silence passed.
        """
        # Ranks must not train on without a leader: the next leader starts the attempt again, and
        # two attempts must never write checkpoints at the same time.
        if self.attempts.attempt is not None:
            log.error("leader silent for %.1f s: stopping the ranks", self.silent_for())
            await self.attempts.end(LEAVE_GRACE_S, alone_since=self.last_heard)
        if self.config.outlives_leader:
            # `_serve` comes here every RETRY_S, so the message is logged once.
            if not self.alone.is_set():
                log.error("leader silent for %.1f s: asking the scheduler", self.silent_for())
            self.alone.set()
        # Where the cluster replaces a lost leader, this agent waits for the new one.
        elif alone_s >= self.config.patience_s:
            log.error("leader silent for %.1f s: exiting", self.silent_for())
            self.exit_code = exit_codes.LEADER_LOST

    async def _leader_has_ended(self) -> bool:
        """Whether the leader's process has certainly ended, so that waiting longer is useless: its
        port is closed, and the kernel has released its lock on the journal."""
        if not self.config.outlives_leader or not self.unserved or self.silent_for() < ENDED_S:
            return False
        try:
            return not await self.worker(self.storage.leader_holds_journal)
        except OSError:  # a file system without locks cannot tell
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
            # A dead host refuses nothing, so without a limit this try would last for the minutes of
            # a TCP timeout.
            async with asyncio.timeout(self.config.agent_timeout):
                ws = await self.connector.connect(place, claim)
        except WrongLeader:
            # Another job's leader may have got the port that this job's leader used before.
            log.warning("%s is not this job's leader: it has another certificate", place)
        except NotAdmitted as exc:
            self._refused(exc)
        except ConnectionRefusedError:
            # The host answers, but the port is closed. A dead host would give a timeout instead.
            self.unserved = True
            raise
        else:
            await self._converse(ws)

    async def _converse(self, ws: Line) -> None:
        # The leader accepted the secret, so earlier refusals were accidents.
        self.refusals = 0
        both: list[asyncio.Task[None]] = []
        try:
            await self._send(ws, self._register())
            # The leader may have missed how ranks ended while the connection was down, so report
            # that again. An unsent report of the attempt's end is dropped: `again` has a newer
            # version of it, with the present `alone_s`.
            again = await self.attempts.ends()
            former = self.attempts.ended
            self.outbox = deque(
                report
                for report in self.outbox
                if report is not former and not isinstance(report, HostWarned)
            )
            self.outbox.extend(again)
            now = self.clock.monotonic()
            self.outbox.extend(
                replace(one, age_s=now - noticed) for one, noticed in self.warnings.values()
            )
            both += [asyncio.create_task(self._speak(ws)), asyncio.create_task(self._obey(ws))]
            done, _ = await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            # This raises what broke the connection. `_serve` ignores network errors and reconnects.
            for task in done:
                task.result()
        finally:
            for task in both:
                task.cancel()
            await asyncio.gather(*both, return_exceptions=True)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_S):  # a leader that is gone never closes its side
                    await ws.close()

    def _refused(self, exc: NotAdmitted) -> None:
        """Give up after several refusals in a row. A single one may be an accident, such as a
        connection that broke between challenge and proof."""
        log.error("the leader refused this agent: %s", exc)
        self.refusals += 1
        # An agent that waits for another leader keeps trying: that one may accept the secret.
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
            boot=self.config.boot,
            former_stopped=self.config.former_stopped,
        )
        return Register(agent=registered, launch=self.config.term.launch, sent_at=self.clock.now())

    async def _speak(self, ws: Line) -> None:
        """Send reports as they arise, and a digest at every pulse."""
        while self.exit_code is None:
            while self.outbox:
                await self._send(ws, self.outbox[0])
                self.outbox.popleft()  # only now: if sending fails, it is sent after reconnecting
            # Cleared before the digest is sent: a report that arises during that wakes `_rest` at
            # once.
            self.wake.clear()
            await self._send(ws, self.attempts.digest())
            await self._rest()

    async def _rest(self) -> None:
        """Return when something is to be sent: a report, or a digest because a pulse is due or all
        ranks have made no progress for `still_s`."""
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
            # The agent was suspended, or had no processor. Its ranks probably were as well, so that
            # time must not make them look hung.
            if attempt is not None and late > LATE_S:
                attempt.excuse(late)

    async def _send(self, ws: Line, report: Report) -> None:
        await ws.send_str(wire.encode(report).decode())

    async def _obey(self, ws: Line) -> None:
        while self.exit_code is None:
            message = await self._next_order(ws)
            if message is None:
                log.warning("leader silent for %.1f s: reconnecting", self.silent_for())
                return
            if message.type is not aiohttp.WSMsgType.TEXT:  # the leader closed the connection
                return
            self.last_heard = self.clock.monotonic()
            self.alone.clear()
            # A live leader got the signal of the scheduler too, and acts on it.
            self.unheeded = ""
            order: Order = ORDERS.decode(message.data.encode())
            self._perform(order)

    async def _next_order(self, ws: Line) -> aiohttp.WSMessage | None:
        """None when the leader was silent for longer than `agent_timeout`.

        The time in which this agent was suspended itself does not count. `scontrol suspend` stops
        all processes of a job, including the leader. After `scontrol resume` every process has an
        overdue timer, while the messages of the others are still unread in its socket.
        """
        receiving = asyncio.ensure_future(ws.receive())
        left = self.config.agent_timeout
        try:
            while left > 0:
                begun, listen_s = self.clock.monotonic(), min(left, LISTEN_S)
                done, _ = await asyncio.wait({receiving}, timeout=listen_s)
                late = self.clock.monotonic() - begun - listen_s
                if late > LATE_S:
                    log.warning("this agent was suspended for %.1f s", late)
                    self.last_heard += late
                if done:
                    return receiving.result()
                left -= listen_s
            return None
        finally:
            receiving.cancel()

    def _perform(self, order: Order) -> None:  # noqa: C901 - a case a kind
        match order:
            case Pulse(still_s=still_s):
                self.still_s = math.inf if still_s is None else still_s
            case OfferPort():
                port = self.processes.free_port()
                self._report(Port(attempt=order.attempt, port=port))
            case OfferSlots():
                self._spawn(self._offer_slots(order))
            # This order and the next four take long. As tasks they do not delay later orders, such
            # as Stop.
            case CheckFabric():
                self._spawn(self._check(order))
            case Start():
                self._spawn(self.attempts.start(order))
            case Prepare():
                self._spawn(self.attempts.prepare(order))
            case Stop():
                self._spawn(self.attempts.stop(order))
            case Save():
                self.attempts.save(order)
            case Gather():
                self._spawn(self.attempts.gather(order))
            case ProfileRanks():
                self.attempts.profile(order)
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
        self.tasks.discard(task)
        # An unexpected exception is a defect of the agent. If the agent stayed, its ranks would
        # look hung; so it exits, and the leader sees a lost agent.
        if not task.cancelled() and task.exception() is not None:
            log.critical("this agent has a defect: exiting", exc_info=task.exception())
            self.leave(exit_codes.FAILED)

    def _report(self, report: Report) -> None:
        if isinstance(report, HostWarned):
            self.warnings[report.problem] = report, self.clock.monotonic()
        self.outbox.append(report)
        self.wake.set()

    async def _check(self, order: CheckFabric) -> None:
        # The leader repeats the order after a reconnection: the check must not run twice.
        if order.check in self.checks:
            self._report_check(self.checks[order.check])
            return
        self.checks[order.check] = None
        self.checks[order.check] = await self.processes.check_fabric(order)
        self._report_check(self.checks[order.check])

    async def _offer_slots(self, order: OfferSlots) -> None:
        self._report(await self.processes.offer_slots(order.attempt))

    def _report_check(self, checked: Checked | None) -> None:
        if checked is not None:  # else the check is running, and reports when it ends
            self._report(checked)
