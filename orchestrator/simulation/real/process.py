"""The process of an agent on a simulated host: it runs the real `Agent` and, where it leads, the
real `Leader`, as `backends/entry` starts them.

The world and its laws see it as they see a played agent (`agents.py`). A process that is killed
runs nothing any more: its event loop stops, and its lines close.
"""

import asyncio
import inspect
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from orchestrator.agent.agent import Agent, AgentConfig, AgentSeams
from orchestrator.agent.processes.torchrun import HostPlace
from orchestrator.contract.files import exit_codes
from orchestrator.contract.files.fence import Fence, GivenUp
from orchestrator.contract.files.leader_file import Term
from orchestrator.contract.files.run_dir import RunDir
from orchestrator.contract.launch import LaunchPlan
from orchestrator.contract.messages.actions import Action, Requeue
from orchestrator.contract.messages.agent_protocol import Report
from orchestrator.contract.messages.events import Event, HostStopped, RankExited
from orchestrator.contract.plan import Plan
from orchestrator.errors import PlanError
from orchestrator.job.plans import JobPlan, Refit, Shortage
from orchestrator.job_secret import JobSecret
from orchestrator.journal.supervisor import Supervisor, is_journalled
from orchestrator.leader.backend_calls import Planners
from orchestrator.leader.leader import Granted, Leader, LeaderSeams
from orchestrator.seams import AllocationBackend
from orchestrator.simulation.errands import smaller_plan
from orchestrator.simulation.real.attempt import SimulatedAttempt, SimulatedProcesses
from orchestrator.simulation.real.lines import End, SimulatedConnector, SimulatedServer
from orchestrator.simulation.real.loop import VirtualLoop
from orchestrator.simulation.real.run_dir import StoredRunDir
from orchestrator.simulation.world.jobs import plan_for
from orchestrator.simulation.world.ranks import HostRanks
from orchestrator.simulation.world.storage import SNAPSHOT_LINES, Crash, Crashed, StoredJournal
from orchestrator.simulation.world.training import Word

if TYPE_CHECKING:
    from orchestrator.simulation.world.hosts import Host
    from orchestrator.simulation.world.world import World

SECRET = JobSecret(key=b"simulated", pem="", fingerprint=bytes(32))
NOWHERE = RunDir(Path("/nowhere/simulated"))
"""Real files are never there."""
HOLD_POLL_S = 1.0
HOLD_S = 60.0
"""For a former agent of the host, or its ranks, to be gone."""
LOCK_PATIENCE_S = 2.0
LOCK_POLL_S = 0.5


class AgentProcess:
    def __init__(
        self, world: "World", host: "Host", launch: int, restarts: int, lead: bool, turn: int = 1
    ) -> None:
        self.world, self.host, self.launch, self.restarts = world, host, launch, restarts
        self.lead = lead
        self.incarnation = f"{host.name}.{world.drawn()}"
        self.alive, self.holds = True, False
        self.loop = VirtualLoop(world.timeline)
        world.loops.append(self.loop)
        self.leader: LeaderProcess | None = None
        self.server: SimulatedServer | None = None
        self.ends: list[End] = []
        self.attempt: SimulatedAttempt | None = None
        self.storage = StoredRunDir(self)
        config = AgentConfig(
            place=HostPlace(
                python="",
                run_dir=NOWHERE,
                host=host.name,
                address=host.name,
                socket=Path("/nowhere/socket"),
                parent=1,
            ),
            secret=SECRET,
            term=Term(launch, restarts),
            devices=world.scenario.ranks_per_host,
            agent_timeout=world.job.agent_timeout,
            findings=host.findings,
        )
        seams = AgentSeams(
            SimulatedConnector(self), self.storage, SimulatedProcesses(self), self.work
        )
        self.agent = Agent(config, {}, host.clock, seams=seams)
        self.agent.incarnation = self.incarnation
        self.main = self.loop.create_task(self._main())

    async def work(self, call: Any, /, *args: Any, **more: Any) -> Any:
        """The worker: a call takes the time that it says, and none where it says nothing."""
        try:
            found = call(*args, **more)
            if inspect.isawaitable(found):
                found = await found
            else:
                await asyncio.sleep(0)
        finally:
            if not self.alive:
                await self.loop.create_future()  # it died in the call
        return found

    async def _main(self) -> None:
        """As `entry/agent.py`: hold the host, then follow, or lead."""
        begun = self.loop.time()
        while self._is_held():
            if self.loop.time() - begun > HOLD_S:
                self.exit(exit_codes.NOT_ADMITTED)
                return
            await asyncio.sleep(HOLD_POLL_S)
        self.holds, self.agent.last_heard = True, self.loop.time()
        code = await (self._lead() if self.lead else self.agent.run())
        self.exit(code)

    def _is_held(self) -> bool:
        agents = cast("list[AgentProcess]", self.host.agents)
        others = [one for one in agents if one is not self and one.alive and one.holds]
        return bool(others or self.host.ranks)

    async def _lead(self) -> int:
        """As `entry/leader.py`: the fence first, then the journal, then leader and own agent."""
        storage, now = self.world.storage, self.loop.time
        try:
            storage.check_write(self.host.name)
        except OSError:
            return exit_codes.FAILED
        former = storage.fence
        storage.fence = Fence(leader=self.incarnation, attempt=former.attempt if former else 0)
        until = now() + LOCK_PATIENCE_S
        while not self.world.locks(cast(Any, self)):
            if now() > until:
                return exit_codes.FAILED
            await asyncio.sleep(LOCK_POLL_S)
        self.leader = LeaderProcess(self)
        self.world.leaders[self.incarnation] = cast(Any, self.leader)
        self.world.run = self.leader.supervisor.run
        following = self.loop.create_task(self.agent.run())
        return await self.leader.lead(following)

    # What the world does to it

    @property
    def ranks(self) -> HostRanks | None:
        ranks = self.attempt.ranks if self.attempt is not None else None
        return None if ranks is None or ranks.gone else ranks

    @property
    def is_alone(self) -> bool:
        return self.agent.alone.is_set()

    @property
    def talks_to(self) -> "LeaderProcess | None":
        end = next((end for end in reversed(self.ends) if end.line.open), None)
        return end.other.process.leader if end is not None else None

    def report(self, report: Report) -> None:
        if self.alive and isinstance(report, RankExited) and self.attempt is not None:
            self.loop.call_soon(self.agent.attempts.failed, report, self.attempt)

    def tell(self, word: Word) -> None:
        if self.alive:
            self.loop.call_soon(self.agent.attempts.hear, word)

    def wake(self) -> None:
        if self.alive:
            self.agent.wake.set()

    def attempt_ended(self, ranks: HostRanks, stopped: HostStopped) -> None:
        attempt = self.attempt
        if self.alive and attempt is not None and attempt.ranks is ranks:
            attempt.over.set_result(stopped)

    def exit(self, code: int) -> None:
        if self.alive:
            self._over()
            self.world.agent_left(cast(Any, self), code)

    def die(self, *, silently: bool = False) -> None:
        if not self.alive:
            return
        ranks = self.ranks
        self._over(silently=silently)
        if ranks is not None:
            ranks.kill()
        if not silently:
            self.world.agent_left(cast(Any, self), exit_codes.FAILED)

    def _over(self, *, silently: bool = False) -> None:
        self.alive = False
        self.loop.kill()
        ends = [*self.ends, *(self.server.ends if self.server is not None else ())]
        for end in ends:
            if not silently:
                end.hang_up()
        if self.leader is not None:
            self.leader.over(silently=silently)


class LeaderProcess:
    """A real leader, as the world and its laws see it."""

    def __init__(self, process: AgentProcess) -> None:
        self.process, self.agent, self.world = process, process, process.world
        self.host, self.name = process.host, process.incarnation
        self.alive, self.paused_until = True, 0.0
        self.journal = StoredJournal(
            self.world.storage, self.host.name, partial(process.storage.check_leader, self.name)
        )
        process.storage.journal = self.journal
        self.supervisor = WitnessedSupervisor(self)
        if self.world.crash_next is not None:
            self.doom(*self.world.crash_next)
            self.world.crash_next = None
        self.leader = Leader(
            self.supervisor,
            NOWHERE,
            SECRET,
            cast(AllocationBackend, LocalBackend(self)),
            self.host.clock,
            Granted(term=Term(process.launch, process.restarts)),
            Planners(fewer=self._fewer, less=self._less),
            self.name,
            LeaderSeams(partial(SimulatedServer, process), process.storage, process.work),
        )
        self.leader.snapshots.every = SNAPSHOT_LINES
        self.monitor = self.leader.monitor

    @property
    def serves(self) -> bool:
        return self.process.server is not None

    @property
    def lookout(self) -> Any:
        return self.leader.monitor

    async def lead(self, following: asyncio.Task[int]) -> int:
        """As `_run_both` of `entry/leader.py`."""
        host = self.host.name
        serving = self.leader.serve(host, host, host, Path("/nowhere"))
        leading = asyncio.create_task(serving)
        try:
            await asyncio.wait([leading, following], return_when=asyncio.FIRST_COMPLETED)
            if not leading.done() and following.result() != exit_codes.OK:
                return exit_codes.FAILED
            ending = await leading
        except GivenUp:
            return exit_codes.LEADER_LOST
        finally:
            leading.cancel()
            self.process.agent.leave(exit_codes.LEADER_LOST)
            await asyncio.gather(leading, following, return_exceptions=True)
        if isinstance(ending, Requeue):
            return exit_codes.REQUEUED
        return exit_codes.FAILED if ending.state == "FAILED" else exit_codes.OK

    def cancel(self, by: str) -> None:
        self.process.loop.call_soon(self.leader.cancel, by)

    def warned(self, signal_name: str) -> None:
        self.process.loop.call_soon(self.leader.warned, signal_name)

    def look_now(self) -> None:
        """It looks often enough."""

    def doom(self, number: int, where: Crash | None) -> None:
        """Die `number` lines from here. Between two actions the real leader cannot be stopped."""
        self.journal.crash = (number, where or "after the line")

    def crashes(self, where: str) -> None:
        self.world.history.note(self.host.name, f"the leader is killed {where}")
        self.world.happens("leader")
        self.process.die()

    def over(self, *, silently: bool) -> None:
        self.alive = False
        self.world.leader_gone(cast(Any, self), silently=silently)

    def _fewer(
        self, former: Plan, hosts: Sequence[str], switches: Mapping[str, tuple[str, ...]]
    ) -> JobPlan:
        scenario = self.world.scenario
        found = smaller_plan(len(hosts), scenario.min_hosts, scenario.ranks_per_host)
        return JobPlan(plan=found, number=self.world.number_of(found))

    def _less(
        self,
        former: Plan,
        hosts: Sequence[str],
        switches: Mapping[str, tuple[str, ...]],
        short: Shortage,
    ) -> Refit:
        if not short.adopt:
            return Refit(found=None, why="on_oom is stop")
        each = self.world.scenario.ranks_per_host
        try:
            found = plan_for(len(former.hosts), each, short.device_bytes)
        except PlanError as exc:
            return Refit(found=None, why=exc.message)
        number = self.world.number_of(found)
        return Refit(found=JobPlan(plan=found, number=number), why="refitted")


class WitnessedSupervisor(Supervisor):
    """The real one; the laws judge each of its decisions, and a write takes the disk's time."""

    def __init__(self, leader: LeaderProcess) -> None:
        self.leader = leader
        super().__init__(leader.journal, leader.world.decide, leader.journal.known)

    def take(self, events: Sequence[Event]) -> Any:
        return self._take(events)

    async def _take(self, events: Sequence[Event]) -> tuple[int, tuple[Action, ...]]:
        world, before = self.leader.world, self.run
        if any(type(event).__name__ != "Tick" for event in events):
            await asyncio.sleep(world.storage.delay)
        try:
            count, actions = super().take(events)
        except Crashed as crashed:
            self._judged(before, events, crashed.lines)
            self.leader.crashes(str(crashed))
            return 0, ()
        after = self.run
        if count > 1:
            self._judged(before, events[:count], count)
        else:
            world.witness.heard(events[0], before)
            if is_journalled(events[0], before, after):
                world.decided(cast(Any, self.leader), events[0], actions)
        for incident in after.history.incidents[len(before.history.incidents) :]:
            world.strike(incident)
        return count, actions

    def _judged(self, run: Any, events: Sequence[Event], lines: int) -> None:
        """Have the first `lines` of which the journal has a line judged one by one."""
        world = self.leader.world
        for event in events:
            before = run
            run, actions = self.decide(before, event)
            told = is_journalled(event, before, run)
            if told and lines == 0:
                return
            world.witness.heard(event, before)
            if not told:
                continue
            lines -= 1
            self.run = run
            world.decided(cast(Any, self.leader), event, actions)


class LocalBackend:
    """What a leader asks of a cluster without a scheduler."""

    granted = successors = fixed_hosts = unattended = None

    def __init__(self, leader: LeaderProcess) -> None:
        self.leader = leader

    def replace(
        self,
        launch: LaunchPlan,
        host: str,
        *,
        elsewhere: bool = False,
        shut: bool = False,
        silent_s: float = 0.0,
    ) -> None:
        self.leader.world.replace_agent(
            cast(Any, self.leader), host, elsewhere=elsewhere, shut=shut, silent_s=silent_s
        )
