"""The process of an agent on a simulated host. It runs the real `Agent` and, if it leads, the real
`Leader`, composed like the entry points.

When a process is killed, its event loop stops and its connections close.
"""

import asyncio
import inspect
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from orchestrator.agent.agent import (
    FIND_ALLOCATED_S,
    FIND_LEADER_S,
    LOCK_WAIT_S,
    Agent,
    AgentConfig,
    AgentSeams,
)
from orchestrator.agent.processes.torchrun import HostPlace
from orchestrator.contract.files import exit_codes
from orchestrator.contract.files.leader_file import Term
from orchestrator.contract.files.run_dir import RunDir
from orchestrator.contract.messages.agent_protocol import Report
from orchestrator.contract.messages.events import HostStopped, RankExited
from orchestrator.errors import InUse
from orchestrator.failover.leader_lost import Claim
from orchestrator.failover.storage import FailoverStorage
from orchestrator.failover.takeover import FollowingSeams, run_follower
from orchestrator.job_secret import JobSecret
from orchestrator.journal.supervisor import OpenJournal, Supervisor
from orchestrator.leader.leader import HostRecords, Leader, LeaderSeams
from orchestrator.leader.leader_main import LeadingSeams, Listening, lead, lead_on
from orchestrator.seams import AllocationBackend
from orchestrator.simulation.processes.attempt import SimulatedAttempt, SimulatedProcesses
from orchestrator.simulation.processes.backend import backend_of
from orchestrator.simulation.processes.leader_process import LeaderProcess
from orchestrator.simulation.processes.loop import VirtualLoop
from orchestrator.simulation.processes.planners import planners_of
from orchestrator.simulation.processes.run_dir import StoredRunDir
from orchestrator.simulation.processes.transport import (
    SimulatedConnector,
    SimulatedServer,
    SimulatedWebsocket,
)
from orchestrator.simulation.world.host_memory import HostMemory
from orchestrator.simulation.world.ranks import HostRanks
from orchestrator.simulation.world.storage import StoredJournal
from orchestrator.simulation.world.training import TrainingNews

if TYPE_CHECKING:
    from orchestrator.simulation.world.hosts import Host
    from orchestrator.simulation.world.world import World

SECRET = JobSecret(key=b"simulated", pem="", fingerprint=bytes(32))
NOWHERE = RunDir(Path("/nowhere/simulated"))
"""A path at which no real file exists."""
LISTENING = Listening(bind="", folder=Path("/nowhere"))
HOLD_POLL_S = 1.0
DETECT_S = 1.0
"""Seconds between two hang checks; longer than on a real machine, because most find nothing."""
KILLED = 128 + signal.SIGKILL
"""Exit code of a process that SIGKILL ended."""


class AgentProcess:
    run_dir_type = StoredRunDir

    def __init__(
        self,
        world: "World",
        host: "Host",
        launch: int,
        restarts: int,
        lead: bool,
        turn: int = 1,
    ) -> None:
        self.world, self.host, self.launch, self.restarts = world, host, launch, restarts
        self.lead, self.turn = lead, turn
        self.incarnation = f"{host.name}.{world.next_number()}"
        self.alive, self.holds_lock = True, False
        self.loop = VirtualLoop(world.timeline)
        world.loops.append(self.loop)
        self.leader: LeaderProcess | None = None
        self.server: SimulatedServer | None = None
        self.websockets: list[SimulatedWebsocket] = []
        self.attempt: SimulatedAttempt | None = None
        self.memory = HostMemory()
        self.storage = self.run_dir_type(self)
        self.fence_name = ""
        """Name of its leader in the fence."""
        self.requested_requeue = False
        """It has requested the requeue of the job."""
        self.is_pod = world.scenario.successor_s is not None
        self.agent = self._new_agent()
        self.loop.create_task(self._main())

    def _config(self) -> AgentConfig:
        """The config that `entry/agent.py` reads from its command line."""
        world, scheduled = self.world, self.world.scenario.scheduled
        return AgentConfig(
            place=HostPlace(
                python="",
                run_dir=NOWHERE,
                host=self.host.name,
                address=self.host.name,
                socket=Path("/nowhere/socket"),
                parent=1,
            ),
            secret=SECRET,
            term=Term(self.launch, self.restarts),
            devices=world.scenario.ranks_per_host,
            agent_timeout=world.job.agent_timeout,
            scheduled=scheduled,
            findings=self.host.findings,
            boot=self.host.boot,
            find_leader_s=FIND_ALLOCATED_S if scheduled and not self.is_pod else FIND_LEADER_S,
            patience_s=world.scenario.successor_s or 0.0,
            outlives_leader=not self.is_pod and not self.lead,
        )

    def _new_agent(self) -> Agent:
        connector, processes = SimulatedConnector(self), SimulatedProcesses(self)
        seams = AgentSeams(connector, self.storage, processes, self.work)
        agent = Agent(self._config(), {}, self.host.clock, seams=seams)
        agent.incarnation = self.incarnation
        self.agent = agent
        return agent

    async def work(self, call: Any, /, *args: Any, **more: Any) -> Any:
        """The worker. A call that is a coroutine takes virtual time; other calls take none."""
        try:
            found = call(*args, **more)
            if inspect.isawaitable(found):
                found = await found
            else:
                await asyncio.sleep(0)
        finally:
            if not self.alive:
                await self.loop.create_future()  # the process died during the call
        return found

    async def _main(self) -> None:
        try:
            self.exit(await self._run())
        except Exception as exc:  # noqa: BLE001 - the simulation reports it
            self.world.defects.append(exc)

    async def _run(self) -> int:
        """Like `entry/agent.py`: lock the host, then follow or lead."""
        if self.is_pod and (ending := self._job_ending()) is not None:
            # As `entry/pod_agent.py`: a pod that starts after the end has nothing to run.
            return exit_codes.FAILED if ending == "FAILED" else exit_codes.OK
        begun = self.loop.time()
        while self._is_held():
            if self.loop.time() - begun > LOCK_WAIT_S:
                return exit_codes.LEADER_LOST if self.is_pod else exit_codes.NOT_ADMITTED
            await asyncio.sleep(HOLD_POLL_S)
        self.holds_lock = True
        code = await (self._lead() if self.lead else self._follow())
        if self.is_pod and code == exit_codes.FAILED and self._job_ending() != "FAILED":
            # As `entry/pod_agent.py`: a failed agent does not mean a failed job.
            return exit_codes.LEADER_LOST
        return code

    def _job_ending(self) -> str | None:
        run = self.world.storage.fold()
        current = run.job is not None and run.job.launch.launch == self.launch
        return run.ending if current else None

    def _is_held(self) -> bool:
        others = [
            one for one in self.host.agents if one is not self and one.alive and one.holds_lock
        ]
        return bool(others or self.host.ranks)

    async def _lead(self) -> int:
        try:
            return await lead(
                self._config(),
                LISTENING,
                self._leading_seams(),
                self._new_agent,
                prepare=_nothing,
            )
        except InUse:
            return exit_codes.LEADER_LOST if self.is_pod else exit_codes.FAILED

    async def _follow(self) -> int:
        self._new_agent()  # it starts to look for its leader

        async def takes_the_lead(
            agent: Agent, following: asyncio.Task[int], claim: Claim
        ) -> int | None:
            return await lead_on(agent, following, claim, LISTENING, self._leading_seams())

        seams = FollowingSeams(
            backend_named=self._backend_named,
            clock=self.host.clock,
            storage=cast(FailoverStorage, self.storage),
            lead=takes_the_lead,
        )
        return await run_follower(self.agent, seams, turn=self.turn)

    # Seams of a leader

    def _leading_seams(self) -> LeadingSeams:
        leader = LeaderSeams(
            server=partial(SimulatedServer, self),
            storage=self.storage,
            worker=self.work,
            free_port=lambda address: 29_500,
            detect_s=DETECT_S,
        )
        return LeadingSeams(
            storage=cast(FailoverStorage, self.storage),
            backend_named=self._backend_named,
            supervisor=self._supervisor,
            reached=lambda: self.world.storage.reached,
            records=self._records,
            planners=planners_of(self.world),
            clock=self.host.clock,
            while_leading=self._while_leading,
            leader=leader,
            worker=self.work,
        )

    def _backend_named(self, name: str) -> AllocationBackend:
        return backend_of(self)

    def _supervisor(self, journal: OpenJournal) -> Supervisor:
        assert isinstance(journal, StoredJournal)
        self.leader = LeaderProcess(self, journal)
        self.world.leaders[self.incarnation] = self.leader
        self.world.run = self.leader.supervisor.run
        return self.leader.supervisor

    def _records(self, backend: AllocationBackend) -> HostRecords:
        return self.world.host_records(self.host.clock.now())

    @asynccontextmanager
    async def _while_leading(self, leader: Leader) -> AsyncIterator[None]:
        assert self.leader is not None
        self.leader.begin(leader)
        self.world.history.note(self.host.name, "leads")
        try:
            yield
        finally:
            if self.alive:
                self.leader.ended(silently=False)
                self.leader = None

    def took_over(self, name: str) -> None:
        """Called when the process has written its name to the fence."""
        self.fence_name = name
        if not self.lead:
            self.world.history.note(self.host.name, "takes over")
            self.world.laws.check_takeover(self, self.world.storage.fold())

    # Called by the world

    @property
    def ranks(self) -> HostRanks | None:
        ranks = self.attempt.ranks if self.attempt is not None else None
        return None if ranks is None or ranks.have_exited else ranks

    @property
    def is_alone(self) -> bool:
        return self.agent.alone.is_set()

    @property
    def heard_leader(self) -> LeaderProcess | None:
        websocket = next(
            (websocket for websocket in reversed(self.websockets) if websocket.connection.open),
            None,
        )
        return websocket.other.process.leader if websocket is not None else None

    def report_exit(self, report: Report) -> None:
        if self.alive and isinstance(report, RankExited) and self.attempt is not None:
            self.loop.call_soon(self.agent.attempts.failed, report, self.attempt)

    def report_news(self, news: TrainingNews) -> None:
        if self.alive:
            self.loop.call_soon(self.agent.attempts.hear, news)

    def wake(self) -> None:
        if self.alive:
            self.agent.wake.set()

    def attempt_ended(self, ranks: HostRanks, stopped: HostStopped) -> None:
        attempt = self.attempt
        if self.alive and attempt is not None and attempt.ranks is ranks:
            attempt.ended.set_result(stopped)

    def receive_signal(self, signal_name: str) -> None:
        """The scheduler sends a signal. SIGTERM ends a process without a handler; other signals are
        ignored until a handler exists."""
        number = signal.Signals[signal_name]
        if self.alive and not self.loop.run_signal_handler(number) and number == signal.SIGTERM:
            self.die()

    def exit(self, code: int) -> None:
        if self.alive:
            if code == exit_codes.LEADER_LOST and self.agent.config.outlives_leader:
                self.world.laws.check_exit_without_leader(self)
            self._end()
            self.world.agent_left(self, code)

    def die(self, *, silently: bool = False) -> None:
        """SIGKILL; the kernel kills the ranks too. `silently`: its host lost power, so no other
        process is informed."""
        if not self.alive:
            return
        ranks = self.ranks
        self.loop.was_killed = True
        self._end(silently=silently)
        if ranks is not None:
            ranks.kill()
        if not silently:
            self.world.agent_left(self, KILLED)

    def _end(self, *, silently: bool = False) -> None:
        self.alive = False
        self.loop.kill()
        if not silently:
            self.world.laws.culprits.ended_alone[self.incarnation] = self.host.boot
        websockets = [
            *self.websockets,
            *(self.server.websockets if self.server is not None else ()),
        ]
        for websocket in websockets:
            if not silently:
                websocket.disconnect()
        if self.leader is not None:
            self.leader.ended(silently=silently)
        if not silently:
            self.world.release_lock(self)
            turn = self.world.storage.turn
            if turn is not None and turn.process is self:
                turn.close()


async def _nothing() -> None:
    pass
