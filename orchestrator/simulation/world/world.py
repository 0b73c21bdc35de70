"""Everything that a simulated job touches, and who meets whom there."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

from orchestrator import host_strikes
from orchestrator.contract.files.fence import Fence, GivenUp
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
from orchestrator.errors import Unanswered
from orchestrator.job.failures.policy import strike_weight
from orchestrator.job.incident import Incident
from orchestrator.job.leader_change import expected_back, takes_over
from orchestrator.job.stage import Ended, Running
from orchestrator.job.state import Run
from orchestrator.journal.supervisor import Decide, Supervisor
from orchestrator.simulation.agents import Agent
from orchestrator.simulation.clock import EPOCH, HostClock, Timeline
from orchestrator.simulation.history import History
from orchestrator.simulation.laws.invariants import Witness
from orchestrator.simulation.leaders import Leader
from orchestrator.simulation.real.loop import VirtualLoop
from orchestrator.simulation.scenario import Scenario
from orchestrator.simulation.world.hosts import Host
from orchestrator.simulation.world.jobs import submitted
from orchestrator.simulation.world.k8s_operator import Operators
from orchestrator.simulation.world.network import SCHEDULER, Network
from orchestrator.simulation.world.ranks import HostRanks
from orchestrator.simulation.world.scheduler import Scheduler
from orchestrator.simulation.world.storage import (
    LEASE_S,
    Crash,
    Storage,
    StoredJournal,
    Whereabouts,
)
from orchestrator.simulation.world.training import Training, Work
from orchestrator.simulation.world.training_faults import Troubles

LOGIN = "login"
"""Where the person sits."""
LEAF = 3
"""Hosts under one switch."""
LOCK_POLL_S = 1.0
TAKE_OVER_S = 120.0
LOCK_PATIENCE_S = 2.0
RANKS_START_S = 0.5
CALM_AFTER_S = 60.0
"""Consequences of a fault are looked at closely for so long."""


class World:
    def __init__(  # noqa: PLR0915 - all that there is, piece by piece
        self,
        scenario: Scenario,
        decide: Decide,
        *,
        fenced: bool = True,
        kept: bool = False,
        starts: Any = Agent,
    ) -> None:
        """`starts`: makes the process of an agent, a played one or one that runs the real code."""
        self.starts = starts
        self.loops: list[VirtualLoop] = []
        self.scenario, self.decide, self.fenced = scenario, decide, fenced
        self.timeline = Timeline()
        self.random = Random(scenario.seed + 1)
        self.history = History(self.timeline, kept)
        self.network = Network(self.timeline, self.random)
        self.storage = Storage(self.timeline, self.network)
        self.hosts: dict[str, Host] = {}
        self.leaders: dict[str, Leader] = {}
        """By incarnation; of those that were, too."""
        self.trainings: dict[int, Training] = {}
        self.strikes: list[host_strikes.Line] = [
            host_strikes.Pinned(at=EPOCH, host=host, use=use, by="ann", reason="she says so")
            for host, use in scenario.pinned.items()
        ]
        self.troubles = Troubles(self.happens)
        self.plans: list[Plan] = []
        """By number, from 1."""
        self.pause_s = 0.0
        self.troubled_until = 0.0
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
    def leader(self) -> Leader | None:
        """One that lives and serves; the newest where there are two."""
        found = [leader for leader in self.leaders.values() if leader.alive and leader.serves]
        return found[-1] if found else None

    def calm(self, leader: Leader) -> bool:
        return self.timeline.now > self.troubled_until and (
            isinstance(leader.supervisor.run.stage, Running)
        )

    def trouble(self, seconds: float) -> None:
        """Something is amiss for so long: leaders look closely, from this moment on."""
        until = self.timeline.now + seconds + CALM_AFTER_S
        if self.timeline.now > self.troubled_until:
            for leader in list(self.leaders.values()):
                leader.look_now()
        self.troubled_until = max(self.troubled_until, until)

    def passes(self, one: str, other: str) -> bool:
        """Whether a pulse and its answer get through now."""
        if not self.network.reaches(one, other):
            return False
        weather = self.network.weather
        bad = self.timeline.now < weather.until
        return not bad or self.random.randrange(100) >= weather.lost + weather.late // 2

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
            if self.storage.holder_host == host.name and self.storage.holder not in alive:
                self.storage.holder = None

    def happens(self, kind: str) -> None:
        """Those of the kind that are expected have come to something."""
        self.happened[kind] += self.expected.pop(kind, 0)

    # Leaders begin and end

    def becomes_leader(self, agent: Agent) -> None:
        """As `agent.leading.lead`: the fence first, then the lock, then the journal."""
        try:
            self.storage.check_write(agent.host.name)
        except OSError:
            agent.die()
            return
        former = self.storage.fence
        self.storage.fence = Fence(
            leader=agent.incarnation, attempt=former.attempt if former else 0
        )
        patience = TAKE_OVER_S if self.scenario.scheduled else LOCK_PATIENCE_S
        self._opens(agent, self.timeline.now + patience, partial(self._is_held, agent))

    def _is_held(self, agent: Agent) -> None:
        self.history.note(agent.host.name, "the journal is held by another: leaving")
        agent.die()

    def claims(self, agent: Agent, how: str, leads: Callable[[bool], None]) -> None:
        """As `Leaderless._claim` and `agent.leading.lead_on`: an agent that followed takes over
        from a leader that ended so; `leads` is told whether the journal was to be had."""
        if not agent.alive:
            return
        try:
            self.storage.check_write(agent.host.name)
        except OSError:
            self.timeline.after(LOCK_POLL_S, partial(self.claims, agent, how, leads))
            return
        former = self.storage.fence
        attempt = former.attempt if former else 0
        self.storage.fence = Fence(leader=agent.incarnation, attempt=attempt)
        self.history.note(agent.host.name, f"takes over: {how}")
        deadline = self.timeline.now + TAKE_OVER_S
        self._opens(agent, deadline, partial(leads, False), how, partial(leads, True))

    def _opens(
        self,
        agent: Agent,
        deadline: float,
        is_held: Callable[[], None],
        former: str = "",
        begun: Callable[[], None] = lambda: None,
    ) -> None:
        if not agent.alive:
            return
        storage = self.storage
        if not storage.serves(agent.host.name) or not self.locks(agent):
            if self.timeline.now > deadline:
                is_held()
            else:
                again = partial(self._opens, agent, deadline, is_held, former, begun)
                self.timeline.after(LOCK_POLL_S, again)
            return
        journal = StoredJournal(storage, agent.host.name, partial(self._check_leader, agent))
        leader = Leader(self, agent, journal)
        agent.leader, self.leaders[agent.incarnation] = leader, leader
        self.run = leader.supervisor.run
        if not self.announce(leader):
            agent.die()
            return
        begun()
        self._serves(leader, former)

    def _serves(self, leader: Leader, former: str) -> None:
        agent, allocation = leader.agent, None
        exclude: dict[str, str] = {}
        always: tuple[str, ...] = ()
        if self.scenario.scheduled:
            allocation = self.scheduler.allocation(agent)
            exclude, always = self._struck(leader.now())
            leader.errands.hear_notices()
        self._arm(leader)
        if takes_over(run := leader.supervisor.run, allocation):
            followers = expected_back(run, agent.host.name)
            known = {name: run.hosts.by_name[name].incarnation for name in followers}
            leader.connections.await_agents(known)
        self.history.note(agent.host.name, "leads")
        leader.happened(
            LeaderStarted(
                at=leader.now(),
                host=agent.host.name,
                pid=1,
                allocation=allocation,
                exclude=exclude,
                always=always,
                taken=self._taken(leader),
                former=former,
            )
        )
        if leader.agent.unheeded:
            leader.warned(leader.agent.unheeded)
        leader.look()

    def _taken(self, leader: Leader) -> str:
        """Why the scheduler itself ended the leader before, if it did and says so."""
        former = leader.supervisor.run
        if not isinstance(self.scheduler, Operators) or not former.scheduler.leader:
            return ""
        silent_s = {
            former.scheduler.leader: max(0.0, leader.host.clock.now() - former.history.last_at)
        }
        try:
            return self.scheduler.taken(leader.host.name, silent_s).get(former.scheduler.leader, "")
        except Unanswered:
            return ""

    def _arm(self, leader: Leader) -> None:
        if self.crash_next is not None:
            leader.doom(*self.crash_next)
            self.crash_next = None

    def locks(self, agent: Agent) -> bool:
        if not self.lock_is_free:
            return False
        self.storage.holder, self.storage.holder_host = agent.incarnation, agent.host.name
        return True

    @property
    def lock_is_free(self) -> bool:
        """A server takes it from a host that it does not hear for as long as a lease."""
        if self.storage.holder is None:
            return True
        since = self.unserved_since.get(self.storage.holder_host)
        return since is not None and self.timeline.now - since > LEASE_S

    def _check_leader(self, agent: Agent) -> None:
        now = self.storage.fence
        if not self.storage.serves(agent.host.name):
            raise OSError("the server does not answer")
        if now is not None and now.leader != agent.incarnation:
            raise GivenUp("another leader has taken over")

    def _struck(self, now: float) -> tuple[dict[str, str], tuple[str, ...]]:
        """Whom to leave out, and whom to use whatever happens."""
        found = host_strikes.fold(self.strikes, now)
        out = {each.host: host_strikes.describe(each) for each in found if each.is_excluded}
        return out, tuple(each.host for each in found if each.pin and each.pin.use == "always")

    def strike(self, incident: Incident) -> None:
        host = incident.culprit.host
        if host is None or not self.scenario.scheduled:
            return
        if (weight := strike_weight(incident)) > 0:
            self.strikes.append(
                host_strikes.Strike(
                    at=incident.at,
                    host=host,
                    job="simulated",
                    attempt=incident.attempt,
                    kind=incident.kind,
                    cause=incident.cause,
                    weight=weight,
                )
            )

    def announce(self, leader: Leader, *, over: bool = False) -> bool:
        """Write `leader.json`; False where that cannot be done."""
        try:
            self.storage.check_write(leader.host.name)
        except OSError:
            return False
        agent = leader.agent
        said = Whereabouts(agent.launch, agent.restarts, agent.incarnation, over)
        self.storage.whereabouts.append((self.timeline.now, said))
        return True

    def leader_gone(self, leader: Leader, *, silently: bool) -> None:
        """The lock goes with its process; of a host that went off the server finds out."""
        if self.storage.holder == leader.name and not silently:
            self.storage.holder = None
        self.witness.leader_gone(leader)

    def agent_left(self, agent: Agent, code: int) -> None:
        if self.storage.holder == agent.incarnation:
            self.storage.holder = None
        self.history.note(agent.host.name, f"its agent has left with code {code}")
        if self.scenario.scheduled:
            self.scheduler.agent_left(agent, code)

    # Orders to the world

    def starts_ranks(self, agent: Agent, start: Start) -> HostRanks:
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

    def replace_agent(
        self, leader: Leader, name: str, *, elsewhere: bool, shut: bool, silent_s: float
    ) -> None:
        """Raises BackendError."""
        if self.scenario.scheduled:
            asker, agent = leader.host.name, leader.agent
            self.scheduler.replace(
                asker, agent, name, elsewhere=elsewhere, shut=shut, silent_s=silent_s
            )
            return
        host = self.hosts[name]
        host.end_agents()  # on its own host the leader ends itself, before it can start another
        if host.up and not host.dead_on_arrival and name != leader.host.name:
            host.agents.append(self.starts(self, host, self.job.launch, 0, lead=False))

    def parts(self) -> None:
        """Ranks are about to be told to leave, for no failure."""
        happen, self.at_parting = self.at_parting, None
        if happen is not None:
            self.history.note("fault", "something breaks as ranks are about to leave")
            happen()

    def revive_leader(self, agent: Agent, silent_s: float) -> None:
        """Raises BackendError."""
        assert isinstance(self.scheduler, Operators)
        self.scheduler.revive_leader(agent.host.name, agent, silent_s)

    def decided(self, leader: Leader, event: Event, actions: tuple[Action, ...]) -> None:
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

    def _note(self, leader: Leader, event: Event, actions: tuple[Action, ...]) -> None:
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
