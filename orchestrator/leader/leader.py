"""The leader of a job: it takes in events and performs actions. `step` decides, not this module.

All that may change the job's state goes through one queue and one consumer: it is written to the
journal, then `step` decides, then the actions are performed.
"""

import asyncio
import contextlib
import logging
import os
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol, assert_never

from aiohttp import WSMsgType
from msgspec import Struct, field
from msgspec.structs import replace

from orchestrator.agent.connection import Line
from orchestrator.agent.rank_socket import free_port
from orchestrator.contract.files.last_metric import Reached
from orchestrator.contract.files.leader_file import Term
from orchestrator.contract.files.run_dir import RunDir
from orchestrator.contract.launch import Allocation
from orchestrator.contract.memory.peers import SlotsOffered
from orchestrator.contract.messages.actions import (
    Action,
    CheckHosts,
    EndJob,
    GatherEvidence,
    JudgeHang,
    ReplaceAgent,
    Replan,
    Requeue,
    SaveCheckpoint,
    StartAttempt,
    StopAttempt,
)
from orchestrator.contract.messages.agent_protocol import (
    Checked,
    Digest,
    Evidence,
    Leave,
    Port,
    Register,
    Report,
    Save,
    Stop,
)
from orchestrator.contract.messages.events import (
    AgentLost,
    CancelRequested,
    Event,
    EvidenceGathered,
    JobSubmitted,
    LeaderStarted,
    LeaveAsked,
    RunDirLost,
    Tick,
    stamped,
)
from orchestrator.contract.messages.rank_messages import Profiled
from orchestrator.failover.run_dir_watch import RunDirGone
from orchestrator.job.leader_change import expected_back, takes_over
from orchestrator.job.state import has_successors, hosts_given
from orchestrator.job_secret import JobSecret
from orchestrator.journal.supervisor import Supervisor
from orchestrator.leader.agent_sessions import AgentSessions, Silence, report_in
from orchestrator.leader.attempt.spares import Spares
from orchestrator.leader.attempt.start import AttemptStart
from orchestrator.leader.backend_calls import BackendCalls, Planners
from orchestrator.leader.event_queue import EventQueue
from orchestrator.leader.hang_analysis import HangAnalysis, gather_order
from orchestrator.leader.leader_server import LeaderServer, Questions
from orchestrator.leader.monitor import Monitor
from orchestrator.leader.records.log_retention import LogRetention
from orchestrator.leader.records.snapshot_writer import SnapshotWriter
from orchestrator.leader.records.strike_writer import new_lines
from orchestrator.leader.requests.profile_requests import ProfileRequests
from orchestrator.leader.requests.stack_requests import StackRequests
from orchestrator.leader.right_to_lead import RightToLead
from orchestrator.leader.spec_acceptance import SpecAcceptance
from orchestrator.leader.storage import LeaderFiles, LeaderStorage
from orchestrator.posix.retry_io import retry_io_in
from orchestrator.seams import AllocationBackend, Clock, Worker

log = logging.getLogger(__name__)

FAREWELL_S = 5.0
"""Limit for the agents to exit when the job is over."""
RECORD_S = 10.0
"""Limit for recording the speed of the job at its end."""
DETECT_S = 0.25
"""Interval of the detectors."""
LAST_WORDS_S = 2.0
"""Time to write the loss of the run directory to the journal, which may have been moved with it."""
FENCE_S = 1.0
"""Interval at which an idle leader checks the fence."""
CLOSED = (WSMsgType.CLOSE, WSMsgType.CLOSING, WSMsgType.CLOSED)
"""Messages that say that the other side has closed the line."""
STALL_S = 1.0
"""If the detectors run later than this, the leader's machine was suspended or overloaded."""
JOURNALLED_STACKS = 64
"""Ranks of a job up to which the journal has all their stacks."""


class SteadyClock:
    """Unix time that never jumps: the wall clock is read once, at the leader's start."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.offset = clock.now() - clock.monotonic()

    def now(self) -> float:
        return self.offset + self.clock.monotonic()


class HostRecords(Struct, frozen=True, kw_only=True):
    """What earlier jobs and people recorded about the hosts of the cluster."""

    path: Path | None
    """The file that new strikes are written to; None: strikes are not recorded."""
    exclude: Mapping[str, str] = field(default_factory=dict)
    """Hosts that broke earlier jobs -> why they are excluded."""
    always: tuple[str, ...] = ()
    """Hosts that a person pinned, so they are never excluded."""
    cleared: Mapping[str, float] = field(default_factory=dict)
    """Hosts that a person declared healthy again -> when, Unix seconds."""


class Lost(Struct, frozen=True, kw_only=True):
    """The former leader, as one of its agents knows of it."""

    how: str
    """How it ended."""
    host_works: bool = False
    """Its host has shown that it works."""
    heard: float
    """When the agent last heard it, Unix seconds."""


class Granted(Struct, frozen=True, kw_only=True):
    """The allocation and the history that a leader finds when it starts."""

    term: Term
    allocation: Allocation | None = None
    records: HostRecords = HostRecords(path=None)
    """Only hosts of a cluster have some."""
    taken: str = ""
    """Why the scheduler itself ended the former leader."""
    former: Lost | None = None
    """The former leader, if this one takes over within the same allocation."""
    reached: Reached | None = None
    """The progress of the newest attempt."""


class Server(Protocol):
    """The server that agents connect to. `LeaderServer` implements it."""

    async def open(self, bind: str, port: int, folder: Path) -> int:
        """Called once. Listens at `port` if it is free, and returns the port. Raises OSError."""

    async def close(self) -> None:
        """Called last."""


Listen = Callable[[Register, Line], Awaitable[None]]
"""Handles the messages of one agent until its line breaks. The server calls it, with the first
message, for each agent that has proved that it is of the job."""


class LeaderSeams(Struct, frozen=True):
    """The interfaces through which a leader reaches the network, storage and threads."""

    server: Callable[[Listen, Callable[[str], object], Questions], Server]
    """Creates the server. Arguments: what handles an agent, and what cancels the job and asks about
    its ranks on behalf of a person."""
    storage: LeaderStorage
    worker: Worker = asyncio.to_thread
    free_port: Callable[[str], int] = free_port
    """A free port of this host at an address, for a check of the fabric. Raises OSError."""
    detect_s: float = DETECT_S
    """Seconds between two looks at the clock."""


async def _nothing() -> None:
    pass


async def without_harm(what: str, work: Callable[[], Awaitable[None]]) -> None:
    """Do what the end of a job must not depend on. A defect in it is logged, and the agents still
    exit and the hosts are still released."""
    try:
        await work()
    except Exception:
        log.exception("failed to %s", what)


class Leader:
    def __init__(  # noqa: PLR0913 - the world outside, piece by piece
        self,
        supervisor: Supervisor,
        run_dir: RunDir,
        secret: JobSecret,
        backend: AllocationBackend,
        clock: Clock,
        granted: Granted,
        planners: Planners,
        name: str,
        seams: "LeaderSeams | None" = None,
    ) -> None:
        """
        Args:
            seams: None uses the real ones.
        """
        job = supervisor.run.job
        assert job is not None
        self.job: JobSubmitted = job
        self.supervisor = supervisor
        self.run_dir = run_dir
        self.backend = backend
        self.clock = clock
        self.steady = SteadyClock(clock)
        launch = job.launch
        seams = seams or LeaderSeams(
            server=partial(LeaderServer, secret, launch.launch), storage=LeaderFiles(run_dir, clock)
        )
        self.storage, self.worker, self.detect_s = seams.storage, seams.worker, seams.detect_s
        self.events = EventQueue(supervisor, self._act, self.worker)
        self.sessions = AgentSessions(launch.launch, launch.agent_timeout, clock)
        self.stack_requests = StackRequests(lambda: supervisor.run, run_dir, self.sessions)
        self.profile_requests = ProfileRequests(lambda: supervisor.run, self.sessions)
        questions = Questions(stacks=self.stack_requests.take, profiles=self.profile_requests.take)
        self.server = seams.server(self._listen, self.cancel, questions)
        self.monitor = Monitor(job)
        self.attempt_start = AttemptStart(
            job, lambda: supervisor.run, self.sessions, run_dir, clock
        )
        self.spares = Spares(sessions=self.sessions, run_dir=run_dir)
        self.ending: EndJob | Requeue | None = None
        self.hang_analysis = HangAnalysis(
            job, lambda: supervisor.run, self.storage, backend, clock, self.worker
        )
        self.granted = granted
        self.right_to_lead = RightToLead(self.storage, self.worker, name)
        guard = self.right_to_lead.guard
        self.snapshots = SnapshotWriter(
            supervisor, run_dir, guard, storage=self.storage, worker=self.worker
        )
        self.spec_acceptance = SpecAcceptance(
            lambda: supervisor.run, run_dir, launch.launch, guard, self.worker
        )
        self.log_retention = LogRetention(
            lambda: supervisor.run, run_dir, job.keep_attempts, self.worker
        )
        self.background: set[asyncio.Task[None]] = set()
        self.before_release: Callable[[], Awaitable[None]] = _nothing
        """Called when the agents have exited. The release may end this process."""
        self.announced = asyncio.Event()
        """Set when agents can find this leader."""
        self.backend_calls = BackendCalls(
            job=job,
            run=lambda: supervisor.run,
            sessions=self.sessions,
            backend=backend,
            planners=planners,
            clock=clock,
            happened=self.events.happened,
            gives_up=self.right_to_lead.give_up,
            in_touch=self.events.in_touch,
            now=self.steady.now,
            names_resolve=granted.allocation is None or granted.allocation.names_resolve,
            worker=self.worker,
            free_port=seams.free_port,
        )

    # Input from outside

    async def serve(
        self, host: str, bind: str, address: str, folder: Path, port: int = 0, boot: str = ""
    ) -> EndJob | Requeue:
        """Lead the job to its end, or until it is requeued.

        Args:
            boot: the kernel's id of the last boot of `host`.
            folder: for the server's certificate; only this process may enter it.
            port: preferred port; another one is used if it is taken.

        Raises:
            GivenUp: another leader has taken over. This leader has changed nothing since.
        """
        self.backend_calls.host, self.backend_calls.address = host, address
        # The new leader was an agent of the former one. Except for the agent of the former leader,
        # the agents still run and look for it.
        run, granted = self.supervisor.run, self.granted
        former = granted.former
        if takes_over(run, granted.allocation, former.how if former else ""):
            followers = expected_back(run, host)
            known = run.hosts.by_name
            self.sessions.await_agents({name: known[name].incarnation for name in followers})
        records = self.granted.records
        self._happened(  # before any agent can connect, so it is the first event
            LeaderStarted(
                at=self.steady.now(),
                host=host,
                pid=os.getpid(),
                allocation=self.granted.allocation,
                exclude=records.exclude,
                always=records.always,
                cleared=records.cleared,
                taken=self.granted.taken,
                former=former.how if former else "",
                host_works=former.host_works if former else False,
                heard=former.heard if former else None,
                reached=self.granted.reached,
                boot=boot,
            )
        )
        tasks: list[asyncio.Task[Any]] = []
        try:
            port = await self.server.open(bind, port, folder)
            allocation = self.granted.allocation
            # Agents check that this name resolves to the address. Where no name resolves, the check
            # would only report that.
            name = host if allocation and allocation.names_resolve else ""
            announced = partial(self.storage.announce, self.granted.term, address, port, name)
            # Inside `try`: the leader's own agent may exit meanwhile and cancel this task. Then the
            # port must be closed as well.
            what = "failed to write the leader's address for agents"
            await retry_io_in(self.worker, announced, what, asyncio.sleep)
            log.info("leading %s at %s:%s", self.job.launch.job, address, port)
            self.announced.set()
            deciding = asyncio.create_task(self._consume())
            tasks += [deciding, asyncio.create_task(self._tick())]
            if self.granted.allocation is not None:
                tasks.append(asyncio.create_task(self.backend_calls.hear_notices()))
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            ending = _ending_of(deciding, done)
            if isinstance(ending, EndJob):
                await without_harm("record the speed of the job", self._record_speed)
            # The agents exit before the hosts are released, because the release kills what still
            # runs there.
            await self._farewell(ending)
            await without_harm("send the last messages", self.before_release)
            if isinstance(ending, EndJob) and self.granted.allocation is not None:
                await self.backend_calls.release()
            return ending
        finally:
            for task in (*tasks, *self.background):
                task.cancel()
            # Also of tasks that failed while the agents were told of the end: asyncio would print
            # their exceptions as lost ones.
            await asyncio.gather(*tasks, *self.background, return_exceptions=True)
            await self.server.close()

    def cancel(self, by: str) -> None:
        """Have the ranks stop after a checkpoint, and end the job."""
        self._happened(CancelRequested(at=self.steady.now(), by=by))

    def warned(self, signal_name: str) -> None:
        """The scheduler sent a signal: stop the ranks after their next step, and ask it why."""
        # A signal after the ending is decided changes nothing.
        if self.ending is None:
            # First the event, so that the ranks stop soon. The scheduler may take seconds to say
            # why.
            self._happened(LeaveAsked(at=self.steady.now(), cause=None, words=signal_name))
            self._in_background(self.backend_calls.ask_why(signal_name))

    async def _listen(self, register: Register, ws: Line) -> None:
        """Handle an agent's messages until its connection breaks or the agent is given up."""
        agent = register.agent
        # Asked before `admit`, which counts the agent as heard.
        silent_s = self.sessions.silent_for(agent.host)
        connection, is_new = self.sessions.admit(register, ws)
        if is_new:
            # Without a scheduler all agents run on this machine, so there is no second host to
            # compare.
            own = await self.backend_calls.look_at(register) if self.granted.allocation else ()
            taken = await self.backend_calls.taken_before(agent.host, silent_s)
            self._take_in(replace(agent, findings=(*agent.findings, *own), taken=taken))
        # An agent that connects while the job ends missed the order to exit.
        if self.ending is not None and _all_leave(self.ending):
            self.sessions.order(agent.host, self._goodbye(self.ending))
        speaking = asyncio.create_task(self.sessions.speak(connection, ws))
        try:
            while (message := await ws.receive()).type not in CLOSED:
                if not self.sessions.knows(connection, ws):
                    # It was silent for too long. Its loss is decided, so it must come as a new one.
                    log.warning(
                        "dropping a given-up agent, which must register again: %s", agent.host
                    )
                    break
                connection.heard = self.clock.monotonic()
                self._reported(report_in(message))
        finally:
            speaking.cancel()
            # The agent may have reconnected. Then the connection has a newer socket.
            if connection.ws is ws:
                connection.ws = None

    def _reported(self, report: Report) -> None:
        match report:
            case Digest():
                for event in self.monitor.hear(report, self.clock.monotonic()):
                    self._take_in(event)
            case Port():
                self.attempt_start.hear_port(report)
            case SlotsOffered():
                self.attempt_start.hear_slots(report)
            case Evidence():
                self._evidence(report)
            case Checked():
                self.backend_calls.checked[report.host] = report
            case Profiled():
                self.profile_requests.hear(report)
            case Register():
                pass
            case _:
                self._take_in(report)  # all other reports are events

    def _evidence(self, report: Evidence) -> None:
        if report.for_a_person:
            self.stack_requests.hear(report)
            return
        event = report.event
        # An agent sends evidence unasked when one of its ranks has ended. That is not evidence of a
        # hang.
        if not event.unasked:
            self.hang_analysis.hear(report)
        few = self.supervisor.run.plan.world_size <= JOURNALLED_STACKS
        self._take_in(event if few else _without_stacks(event))

    # Time

    async def _tick(self) -> None:
        looked = self.clock.monotonic()
        while True:
            before = self.clock.monotonic()
            await asyncio.sleep(self.detect_s)
            late = self.clock.monotonic() - before - self.detect_s
            if late > STALL_S:
                log.warning("this leader was suspended for %.1f s", late)
                self.sessions.excuse(late)
                self.monitor.excuse(late)
                continue  # read the messages that came meanwhile before judging any silence
            if self.clock.monotonic() - looked >= FENCE_S:
                looked = self.clock.monotonic()
                await self._check_right()
            at = self.steady.now()
            self._lose(self.sessions.forget_silent(), at)
            self.spares.prepare(self.supervisor.run)
            self.attempt_start.order_if_ready()
            self._look()
            # While the leader is cut off it decides nothing, so ticks would only pile up.
            if self.events.in_touch.is_set():
                self._happened(Tick(at=at))

    async def _check_right(self) -> None:
        """Raises GivenUp and RunDirGone. The loss of the run directory is written to the journal
        first, which may still be open in its new place."""
        try:
            await self.right_to_lead.check()
        except RunDirGone as exc:
            log.critical("%s", exc)
            self._happened(RunDirLost(at=self.steady.now(), why=str(exc)))
            await asyncio.sleep(LAST_WORDS_S)
            raise

    def _lose(self, silences: Sequence[Silence], at: float) -> None:
        lost = [
            AgentLost(
                at=at,
                host=silence.host,
                why=silence.why,
                silent_s=silence.silent_s,
                closed=silence.closed,
            )
            for silence in silences
        ]
        others = set(self.sessions.by_host) - {self.backend_calls.host}
        run = self.supervisor.run
        alone = self.granted.allocation is not None and not others
        # If all agents fall silent at once, this host may be the one that was cut off. If other
        # hosts can replace lost ones, the scheduler may have taken the lost ones. Ask it first.
        if lost and (alone or has_successors(run)):
            self._in_background(self.backend_calls.lose(lost, hosts_given(run) if alone else ()))
            return
        for event in lost:
            self._happened(event)

    def _look(self) -> None:
        self.sessions.still_s = self.monitor.still_s
        hears_all = partial(self.sessions.hears, self.supervisor.run.attempt.placement)
        for event in self.monitor.look(hears_all, self.clock.monotonic()):
            self._take_in(event)

    # Decide and act

    def _happened(self, event: Event) -> None:
        self.events.happened(event)

    def _take_in(self, event: Event) -> None:
        """Stamp an event of an agent or detector with the leader's time, and queue it."""
        self._happened(stamped(event, self.steady.now()))

    async def _consume(self) -> EndJob | Requeue:
        while self.ending is None:
            before = self.supervisor.run
            await self.events.decide()
            # Only hosts of a cluster have a history. Local jobs record no strikes.
            if (path := self.granted.records.path) is not None:
                for line in new_lines(before, self.supervisor.run):
                    await self.worker(self.storage.record_strike, path, line)
            # Between two decisions, because only then the state matches the last line of the
            # journal.
            if self.snapshots.is_due():
                self._in_background(self.snapshots.remember(self.supervisor.folded))
            if self.log_retention.is_due():
                self._in_background(self.log_retention.tidy())
            if self.spec_acceptance.is_due():
                self._in_background(self.spec_acceptance.accept())
        return self.ending

    async def _act(self, action: Action) -> None:
        if isinstance(action, StartAttempt):
            await self.right_to_lead.raise_fence(action.attempt)
        self._perform(action)

    def _perform(self, action: Action) -> None:  # noqa: C901 - a case a kind
        match action:
            case StartAttempt():
                self.monitor.begin(action.attempt, self.supervisor.run, self.clock.monotonic())
                self.attempt_start.begin(action)
            case StopAttempt():
                if not action.hosts:  # the whole attempt stops
                    self.monitor.end()
                    self.attempt_start.drop()
                run = self.supervisor.run
                stop = Stop(
                    attempt=action.attempt,
                    grace_s=action.grace_s,
                    keep_ranks=action.keep_ranks,
                    in_memory=action.in_memory,
                )
                for host in action.hosts or run.attempt.placement:
                    self.sessions.order(host, stop)
            case SaveCheckpoint():
                for host in self.supervisor.run.attempt.placement:
                    self.sessions.order(host, Save(attempt=action.attempt))
            case GatherEvidence():
                self.hang_analysis.forget()
                for host in self.supervisor.run.attempt.placement:
                    self.sessions.order(host, gather_order(action))
            case JudgeHang():
                judging = self.hang_analysis.judge(action.attempt, self._happened, self.steady.now)
                self._in_background(judging)
            case ReplaceAgent() | CheckHosts() | Replan():
                self._in_background(self.backend_calls.call(action))
            case Requeue():
                self.monitor.end()
                self._in_background(self._requeue(action))
            case EndJob():
                self.monitor.end()
                self.ending = action
            case _:
                assert_never(action)

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        """Run slow work beside the decisions, which must not wait for it."""
        task = asyncio.create_task(work)
        self.background.add(task)
        task.add_done_callback(self._returned)

    def _returned(self, task: asyncio.Task[None]) -> None:
        self.background.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.critical("a background task has a defect", exc_info=task.exception())

    async def _requeue(self, action: Requeue) -> None:
        # If the scheduler refuses for good, the refusal is an event, and `step` ends the job with
        # it.
        if await self.backend_calls.requeue(action):
            self.ending = action

    async def _record_speed(self) -> None:
        """Before the agents exit, because this host's one then ends this process."""
        # After a loss of the run directory another job's directory may be in its place.
        if self.storage.watch.lost is not None:
            return
        recording = self.worker(self.storage.record_speed, self.supervisor.run)
        try:
            await asyncio.wait_for(recording, RECORD_S)
        except TimeoutError:
            log.warning("storage hangs, so later plans cannot use the speed of this job")

    async def _farewell(self, ending: EndJob | Requeue) -> None:
        """Order all agents to exit, and wait until they have."""
        if not _all_leave(ending):
            return  # the agents stay for the next leader, and notice that this one is gone
        # After a requeue new agents read the file, so it must not say that the job is over. After a
        # loss of the run directory another job's directory may be in its place.
        if isinstance(ending, EndJob) and self.storage.watch.lost is None:
            # Without the file an agent that starts late looks for a leader in vain and then exits.
            # The other agents are told by `Leave`.
            with contextlib.suppress(OSError):
                self.storage.announce_end(self.granted.term)
        for host in list(self.sessions.by_host):
            self.sessions.order(host, self._goodbye(ending))
        # An agent that hangs keeps its connection open. It must not delay the exit of the leader
        # for ever.
        deadline = self.clock.monotonic() + FAREWELL_S
        while self.sessions.open and self.clock.monotonic() < deadline:
            await asyncio.sleep(0.05)

    def _goodbye(self, ending: EndJob | Requeue) -> Leave:
        again = isinstance(ending, Requeue) and has_successors(self.supervisor.run)
        return Leave(reason=ending.reason, again=again)


def _ending_of(
    deciding: asyncio.Task[EndJob | Requeue], done: set[asyncio.Task[Any]]
) -> EndJob | Requeue:
    try:
        # The task that ended first has the ending, or raises what must end this leader.
        for task in done:
            task.result()
    # The journal is gone too, so the job ends even if `step` could not decide it.
    except RunDirGone as exc:
        return EndJob(state="FAILED", reason=str(exc))
    return deciding.result()


def _without_stacks(event: EvidenceGathered) -> EvidenceGathered:
    """Keeps the journal of a large job small. The verdict has the stacks that matter."""
    return replace(event, ranks=tuple(replace(rank, stack=()) for rank in event.ranks))


def _all_leave(ending: EndJob | Requeue) -> bool:
    return isinstance(ending, EndJob) or ending.whole
