"""Everything that a simulated job touches, and who meets whom there."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Protocol

from orchestrator import host_strikes
from orchestrator.contract.launch import LaunchPlan
from orchestrator.contract.messages.actions import Action
from orchestrator.contract.messages.agent_protocol import Start
from orchestrator.contract.messages.events import (
    AgentRegistered,
    Event,
    HangDetected,
    HostFlagged,
    HostLeaving,
    JobSubmitted,
    LeaderStarted,
    StragglerFound,
)
from orchestrator.contract.plan import Plan
from orchestrator.job.stage import Ended
from orchestrator.job.state import Run
from orchestrator.journal.supervisor import Decide, Supervisor
from orchestrator.leader.leader_main import HostRecords
from orchestrator.simulation.clock import EPOCH, HostClock, Timeline
from orchestrator.simulation.history import History
from orchestrator.simulation.laws.invariants import Witness
from orchestrator.simulation.scenario import Scenario
from orchestrator.simulation.world.hosts import Host
from orchestrator.simulation.world.jobs import submitted
from orchestrator.simulation.world.k8s_operator import Operators
from orchestrator.simulation.world.network import SCHEDULER, Network
from orchestrator.simulation.world.ranks import HostRanks
from orchestrator.simulation.world.scheduler import Scheduler
from orchestrator.simulation.world.storage import LEASE_S, Crash, Storage, StoredJournal
from orchestrator.simulation.world.training import Training, Work
from orchestrator.simulation.world.training_faults import Troubles

if TYPE_CHECKING:
    from orchestrator.simulation.processes.agent_process import AgentProcess
    from orchestrator.simulation.processes.leader_process import LeaderProcess
    from orchestrator.simulation.processes.loop import VirtualLoop

LOGIN = "login"
"""Where the person sits."""
LEAF = 3
"""Hosts under one switch."""
RANKS_START_S = 0.5
STRIKES = Path("/nowhere/strikes")


class Starts(Protocol):
    """Starts the process of an agent on a host."""

    def __call__(
        self,
        world: "World",
        host: Host,
        launch: int,
        restarts: int,
        lead: bool,
        turn: int = 1,
    ) -> "AgentProcess": ...


class World:
    def __init__(  # noqa: PLR0915 - all that there is, piece by piece
        self,
        scenario: Scenario,
        decide: Decide,
        *,
        starts: Starts,
        kept: bool = False,
    ) -> None:
        self.starts = starts
        self.loops: list[VirtualLoop] = []
        self.defects: list[BaseException] = []
        """What processes raised that no code of theirs expected."""
        self.scenario, self.decide = scenario, decide
        self.timeline = Timeline()
        self.random = Random(scenario.seed + 1)
        self.history = History(self.timeline, kept)
        self.network = Network(self.timeline, self.random)
        self.storage = Storage(self.timeline, self.network)
        self.hosts: dict[str, Host] = {}
        self.leaders: dict[str, LeaderProcess] = {}
        """By incarnation of their agents; former leaders, too."""
        self.trainings: dict[int, Training] = {}
        self.strikes: list[host_strikes.Line] = [
            host_strikes.Pinned(at=EPOCH, host=host, use=use, by="ann", reason="she says so")
            for host, use in scenario.pinned.items()
        ]
        self.troubles = Troubles(self.happens)
        self.plans: list[Plan] = []
        """By number, from 1."""
        self.unheard_since: dict[str, float] = {}
        """By the scheduler."""
        self.unserved_since: dict[str, float] = {}
        self.count = 0
        self.crash_next: tuple[int, Crash | None] | None = None
        """For the next leader, where none was there to be killed."""
        self.at_parting: Callable[[], None] | None = None
        """What breaks when ranks are next told to leave in good order."""
        self.at_trouble: Callable[[], object] | None = None
        """What happens when the next leader hears that something broke."""
        self.at_hang: list[Callable[[], None]] = []
        """What happens when it is seen that ranks hang."""
        self.faults: Counter[str] = Counter()
        """By kind, those that were to happen …"""
        self.happened: Counter[str] = Counter()
        """… and that did."""
        self.expected: Counter[str] = Counter()
        """Those of them that have not yet."""
        self.witness = Witness(self)
        self.scheduler: Scheduler | Operators = (
            Scheduler(self) if scenario.successor_s is None else Operators(self)
        )
        self.run = Run()
        """As the newest leader, or the person, left it."""
        for _ in range(scenario.hosts + scenario.spares + (2 if scenario.scheduled else 0)):
            self.add_host()

    # What there is

    def drawn(self) -> int:
        self.count += 1
        return self.count

    def add_host(self) -> None:
        name = f"node-{len(self.hosts)}"
        self.hosts[name] = Host(name, HostClock(self.timeline))

    def number_of(self, plan: Plan) -> int:
        """Under which the run directory has it from now on."""
        self.plans.append(plan)
        return len(self.plans)

    def switches_of(self, host: str) -> tuple[str, ...]:
        return (f"leaf-{int(host.removeprefix('node-')) // LEAF}",)

    @property
    def job(self) -> LaunchPlan:
        assert self.run.job is not None
        return self.run.job.launch

    @property
    def leader(self) -> "LeaderProcess | None":
        """One that lives and serves; the newest where there are two."""
        found = [leader for leader in self.leaders.values() if leader.alive and leader.serves]
        return found[-1] if found else None

    def takes_part(self, host: Host, other: str) -> bool:
        return self.hosts[other].agent is not None and self.network.reaches(host.name, other)

    def unheard(self, host: Host, seconds: float) -> bool:
        """Whether the scheduler has not heard the host for so long."""
        since = self.unheard_since.get(host.name)
        return since is not None and self.timeline.now - since > seconds

    def hears_anew(self) -> None:
        """Whom the scheduler and the storage hear may have changed."""
        for host in self.hosts.values():
            self._serves_anew(host)
            heard = host.up and self.network.reaches(host.name, SCHEDULER)
            if not heard:
                self.unheard_since.setdefault(host.name, self.timeline.now)
            elif self.unheard_since.pop(host.name, None) is not None:
                self.scheduler.node_back(host)

    def _serves_anew(self, host: Host) -> None:
        """A host that went off lost its lock at the latest when it is back."""
        if not (host.up and self.storage.serves(host.name)):
            self.unserved_since.setdefault(host.name, self.timeline.now)
        elif self.unserved_since.pop(host.name, None) is not None:
            alive = {agent.incarnation for agent in host.agents if agent.alive}
            storage = self.storage
            if storage.holder_host == host.name and storage.holder not in alive:
                storage.holder = None
            turn = storage.turn
            if turn is not None and turn.process.host is host and not turn.process.alive:
                turn.close()

    def happens(self, kind: str) -> None:
        """Those of the kind that are expected have come to something."""
        self.happened[kind] += self.expected.pop(kind, 0)

    # The lock on the journal

    def locks(self, process: "AgentProcess") -> bool:
        if not self.lock_is_free:
            return False
        self.storage.holder, self.storage.holder_host = process.incarnation, process.host.name
        return True

    def unlocks(self, process: "AgentProcess") -> None:
        if self.storage.holder == process.incarnation:
            self.storage.holder = None

    @property
    def lock_is_free(self) -> bool:
        """A server takes it from a host that it does not hear for as long as a lease."""
        if self.storage.holder is None:
            return True
        since = self.unserved_since.get(self.storage.holder_host)
        return since is not None and self.timeline.now - since > LEASE_S

    def records(self, now: float) -> HostRecords:
        """What earlier jobs and people have recorded about the hosts."""
        found = host_strikes.fold(self.strikes, now)
        return HostRecords(
            path=STRIKES,
            exclude={one.host: host_strikes.describe(one) for one in found if one.is_excluded},
            always=tuple(one.host for one in found if one.pin and one.pin.use == "always"),
        )

    def agent_left(self, agent: "AgentProcess", code: int) -> None:
        self.history.note(agent.host.name, f"its agent has left with code {code}")
        if self.scenario.scheduled:
            self.scheduler.agent_left(agent, code)

    # Orders to the world

    def starts_ranks(self, agent: "AgentProcess", start: Start) -> HostRanks:
        training = self.trainings.get(start.attempt)
        if training is None:
            scenario = self.scenario
            work = Work(
                scenario.steps,
                scenario.step_s,
                start.pace.every_steps or scenario.save_every,
                scenario.paced,
                start.skip,
                self.plans[int(start.config) - 1].memory.peak_bytes,
            )
            training = Training(
                start.attempt,
                start.nodes,
                work,
                self.timeline,
                self.random,
                self.network,
                self.storage,
                self.troubles,
                self.witness.marked,
            )
            self.trainings[start.attempt] = training
        first = start.node_rank * start.ranks_per_host
        numbers = range(first, first + start.ranks_per_host)
        ranks = HostRanks(agent, start, training, numbers, self.timeline.now)
        agent.host.ranks.append(ranks)
        self.witness.ranks_started(ranks)
        join: Callable[[], None] = partial(training.join, start.node_rank, ranks)
        self.timeline.after(RANKS_START_S, join)
        return ranks

    def restart_agent(self, leader: "AgentProcess", name: str) -> None:
        """On a machine without a scheduler."""
        host = self.hosts[name]
        host.end_agents()
        if host.up and not host.dead_on_arrival and leader.alive:
            host.agents.append(self.starts(self, host, self.job.launch, 0, lead=False))

    def parts(self) -> None:
        """Ranks are about to be told to leave, for no failure."""
        happen, self.at_parting = self.at_parting, None
        if happen is not None:
            self.history.note("fault", "something breaks as ranks are about to leave")
            happen()

    def decided(self, leader: "LeaderProcess", event: Event, actions: tuple[Action, ...]) -> None:
        before, self.run = self.run, leader.supervisor.run
        if self.history.kept:
            self._note(leader, event, actions)
        self.witness.decided(leader, event, actions, before)
        self._met(event, before)

    def _met(self, event: Event, before: Run) -> None:
        """What was to happen when a leader hears of such."""
        match event:
            case StragglerFound():
                self.happens("slow")
            case HostFlagged() | HostLeaving():
                self.happens("drain")
            case HangDetected():
                thaws, self.at_hang = self.at_hang, []
                for thaw in thaws:
                    thaw()
            case _:
                pass
        if self.run.interruption.findings is not None and before.interruption.findings is None:
            happen, self.at_trouble = self.at_trouble, None
            if happen is not None:
                happen()

    def _note(self, leader: "LeaderProcess", event: Event, actions: tuple[Action, ...]) -> None:
        at = f"{leader.host.name}*"
        words = str(event)
        if isinstance(event, (JobSubmitted, LeaderStarted, AgentRegistered)):
            host = getattr(event, "host", "")
            words = f"{type(event).__name__} {host}"
        self.history.note(at, f"{words[:180]}  [{self.run.stage.title}]")
        for action in actions:
            self.history.note(at, f"    -> {type(action).__name__}: {action.reason}")

    # The person

    def submits(self, launch: int) -> bool:
        """`ndctl submit`, with `--resume` from the second time on; False where it is refused."""
        storage = self.storage
        if not self.lock_is_free or storage.full or not storage.serves(LOGIN):
            return False
        storage.holder = None
        hosts = tuple(host.name for host in self.hosts.values() if host.up)
        if not self.scenario.scheduled and not hosts:
            return False
        at = EPOCH + self.timeline.now
        journal = StoredJournal(storage, LOGIN, lambda: None)
        supervisor = Supervisor(journal, self.decide)
        before = supervisor.run
        event = submitted(self.scenario, hosts, at, launch)
        event = replace(event, plan_number=self.number_of(event.plan))
        if launch > 1:
            self.troubles.mended()
        supervisor.feed(event)
        self.run = supervisor.run
        self.history.note("person", f"submits the job, launch {launch}")
        self.witness.submitted(before, event)
        if self.scenario.scheduled:
            self.scheduler.submit(launch)
        else:
            self._starts_here(launch)
        return True

    def _starts_here(self, launch: int) -> None:
        for host in self.hosts.values():
            host.end_agents()
        for name in self.job.hosts:
            host = self.hosts[name]
            if host.up and not host.dead_on_arrival:
                agent = self.starts(self, host, launch, 0, lead=name == self.job.leader)
                host.agents.append(agent)

    @property
    def abandoned(self) -> bool:
        """Nobody leads the job and nobody will: a person has to."""
        if not self.lock_is_free:
            return False
        if self.scenario.scheduled:
            return not self.scheduler.stands
        return not any(agent.alive for host in self.hosts.values() for agent in host.agents)

    @property
    def ended(self) -> bool:
        return isinstance(self.run.stage, Ended)
