"""The simulated world: everything that a job uses, and how the parts reach each other."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Protocol

from msgspec.structs import replace

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
from orchestrator.errors import BackendError
from orchestrator.job.stage import Ended
from orchestrator.job.state import Run
from orchestrator.journal.supervisor import Decide, Supervisor
from orchestrator.leader.leader import HostRecords
from orchestrator.simulation.clock import EPOCH, HostClock, Timeline
from orchestrator.simulation.history import History
from orchestrator.simulation.laws.invariants import Laws
from orchestrator.simulation.scenario import Scenario
from orchestrator.simulation.world.host_memory import HostMemory
from orchestrator.simulation.world.hosts import Host
from orchestrator.simulation.world.jobs import submission_event
from orchestrator.simulation.world.k8s_operator import KubernetesOperator
from orchestrator.simulation.world.network import SCHEDULER, Network
from orchestrator.simulation.world.ranks import HostRanks
from orchestrator.simulation.world.scheduler import Scheduler
from orchestrator.simulation.world.storage import LEASE_S, Crash, Storage, StoredJournal
from orchestrator.simulation.world.training import Training, Work
from orchestrator.simulation.world.training_faults import TrainingFaults

if TYPE_CHECKING:
    from orchestrator.simulation.processes.agent_process import AgentProcess
    from orchestrator.simulation.processes.leader_process import LeaderProcess
    from orchestrator.simulation.processes.loop import VirtualLoop

LOGIN = "login"
"""The host of the user who submits the job."""
LEAF = 3
"""Number of hosts under one switch."""
RANKS_START_S = 0.5
STRIKES_PATH = Path("/nowhere/strikes")


class StartAgent(Protocol):
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
    def __init__(  # noqa: PLR0915 - a list of all parts
        self,
        scenario: Scenario,
        decide: Decide,
        *,
        start_agent: StartAgent,
        keep_history: bool = False,
    ) -> None:
        self.start_agent = start_agent
        self.loops: list[VirtualLoop] = []
        self.defects: list[BaseException] = []
        """Exceptions that no code of ndctl handles."""
        self.scenario, self.decide = scenario, decide
        self.timeline = Timeline()
        self.random = Random(scenario.seed + 1)
        self.history = History(self.timeline, keep_history)
        self.network = Network(self.timeline, self.random)
        self.storage = Storage(self.timeline, self.network)
        self.hosts: dict[str, Host] = {}
        self.leaders: dict[str, LeaderProcess] = {}
        """Incarnation of the agent -> its leader; includes former leaders."""
        self.trainings: dict[int, Training] = {}
        self.strikes: list[host_strikes.Line] = [
            host_strikes.Pinned(at=EPOCH, host=host, use=use, by="ann", reason="she says so")
            for host, use in scenario.pinned.items()
        ]
        self.training_faults = TrainingFaults(self.took_effect)
        self.plans: list[Plan] = []
        """Plan number n is at index n - 1."""
        self.unreachable_since: dict[str, float] = {}
        """Host -> since when the scheduler does not reach it."""
        self.storage_lost_since: dict[str, float] = {}
        """Host -> since when it does not reach the storage."""
        self.count = 0
        self.crash_next: tuple[int, Crash | None] | None = None
        """Where the next leader dies, if there was no leader when the fault began."""
        self.at_next_stop: Callable[[], None] | None = None
        """The fault of the next stop that has no failure as its cause."""
        self.at_next_failure: Callable[[], object] | None = None
        """Called when a leader next receives a failure."""
        self.at_next_hang: list[Callable[[], None]] = []
        """Called when the next hang is detected."""
        self.faults: Counter[str] = Counter()
        """Number of faults that were started, by kind."""
        self.happened: Counter[str] = Counter()
        """Number of faults that had an effect, by kind."""
        self.expected: Counter[str] = Counter()
        """Number of faults that have had no effect yet, by kind."""
        self.laws = Laws(self)
        self.scheduler: Scheduler | KubernetesOperator = (
            Scheduler(self) if scenario.successor_s is None else KubernetesOperator(self)
        )
        self.run = Run()
        """The newest state of the job."""
        for _ in range(scenario.hosts + scenario.spares + (2 if scenario.scheduled else 0)):
            self.add_host()

    # Parts of the world

    def next_number(self) -> int:
        self.count += 1
        return self.count

    def add_host(self) -> None:
        name = f"node-{len(self.hosts)}"
        self.hosts[name] = Host(name, HostClock(self.timeline))

    def add_plan(self, plan: Plan) -> int:
        """Add the plan to the run directory; returns its number."""
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
        """A live leader that serves; the newest if there are two."""
        found = [leader for leader in self.leaders.values() if leader.alive and leader.is_serving]
        return found[-1] if found else None

    def reaches_agent(self, host: Host, other: str) -> bool:
        return self.hosts[other].agent is not None and self.network.reaches(host.name, other)

    def memory_reached_from(self, host: str, other: str) -> HostMemory | None:
        """The memory that the agent of `other` serves, as `host` reaches it."""
        agent = self.hosts[other].agent if other in self.hosts else None
        return agent.memory if agent and self.network.reaches(host, other) else None

    def is_unreachable_for(self, host: Host, seconds: float) -> bool:
        """Whether the scheduler has not reached the host for more than `seconds`."""
        since = self.unreachable_since.get(host.name)
        return since is not None and self.timeline.now - since > seconds

    def update_reachability(self) -> None:
        """Update which hosts the scheduler and the storage reach."""
        for host in self.hosts.values():
            self._update_storage_reach(host)
            heard = host.up and self.network.reaches(host.name, SCHEDULER)
            if not heard:
                self.unreachable_since.setdefault(host.name, self.timeline.now)
            elif self.unreachable_since.pop(host.name, None) is not None:
                self.scheduler.node_back(host)

    def _update_storage_reach(self, host: Host) -> None:
        """A host that lost power loses its locks at the latest when it is back."""
        if not (host.up and self.storage.reachable_from(host.name)):
            self.storage_lost_since.setdefault(host.name, self.timeline.now)
        elif self.storage_lost_since.pop(host.name, None) is not None:
            alive = {agent.incarnation for agent in host.agents if agent.alive}
            storage = self.storage
            if storage.holder_host == host.name and storage.holder not in alive:
                storage.holder = None
            turn = storage.turn
            if turn is not None and turn.process.host is host and not turn.process.alive:
                turn.close()

    def took_effect(self, kind: str) -> None:
        """The expected faults of this kind have taken effect."""
        self.happened[kind] += self.expected.pop(kind, 0)

    # The lock on the journal

    def acquire_lock(self, process: "AgentProcess") -> bool:
        if not self.lock_is_free:
            return False
        self.storage.holder, self.storage.holder_host = process.incarnation, process.host.name
        return True

    def release_lock(self, process: "AgentProcess") -> None:
        if self.storage.holder == process.incarnation:
            self.storage.holder = None

    @property
    def lock_is_free(self) -> bool:
        """The server releases the lock of a host that is unreachable for longer than the lease."""
        if self.storage.holder is None:
            return True
        since = self.storage_lost_since.get(self.storage.holder_host)
        return since is not None and self.timeline.now - since > LEASE_S

    def host_records(self, now: float) -> HostRecords:
        """Strikes and pins of the hosts."""
        found = host_strikes.fold(self.strikes, now)
        return HostRecords(
            path=STRIKES_PATH,
            exclude={one.host: host_strikes.describe(one) for one in found if one.is_excluded},
            always=tuple(one.host for one in found if one.pin and one.pin.use == "always"),
        )

    def agent_left(self, agent: "AgentProcess", code: int) -> None:
        self.history.note(agent.host.name, f"its agent exited with code {code}")
        if self.scenario.scheduled:
            self.scheduler.agent_left(agent, code)

    # Effects of actions

    def start_ranks(self, agent: "AgentProcess", start: Start) -> HostRanks:
        training = self.trainings.get(start.attempt)
        if training is None:
            scenario = self.scenario
            work = Work(
                scenario.steps,
                scenario.step_s,
                start.pace.every_steps or scenario.save_every,
                scenario.auto_interval,
                start.skip,
                self.plans[int(start.config) - 1].needs.peak_bytes,
                start.config if scenario.remembers else None,
                start.lineage,
            )
            training = Training(
                start.attempt,
                start.nodes,
                work,
                self.timeline,
                self.random,
                self.network,
                self.storage,
                self.training_faults,
                self.laws.checkpoint_saved,
                self.memory_reached_from,
                self.laws.memory,
            )
            self.trainings[start.attempt] = training
        first = start.node_rank * start.ranks_per_host
        numbers = range(first, first + start.ranks_per_host)
        ranks = HostRanks(agent, start, training, numbers, self.timeline.now)
        agent.host.ranks.append(ranks)
        self.laws.ranks_started(ranks)
        join: Callable[[], None] = partial(training.join, start.node_rank, ranks)
        self.timeline.after(RANKS_START_S, join)
        return ranks

    def restart_local_agent(self, leader: "AgentProcess", name: str) -> None:
        """Restart an agent of the local backend."""
        host = self.hosts[name]
        host.end_agents()
        if host.up and not host.agent_never_starts and leader.alive:
            host.agents.append(self.start_agent(self, host, self.job.launch, 0, lead=False))

    def clear_local_host(self, name: str) -> str:
        """End all that runs on a host of the local backend. Raises BackendError if ranks stay."""
        host = self.hosts[name]
        host.end_agents()
        if host.ranks:
            raise BackendError(f"ranks on {name} do not exit")
        return "its process had ended, or was killed"

    def stop_begins(self) -> None:
        """Called before ranks are told to stop without a failure."""
        callback, self.at_next_stop = self.at_next_stop, None
        if callback is not None:
            self.history.note("fault", "a failure while ranks are about to stop")
            callback()

    def decided(self, leader: "LeaderProcess", event: Event, actions: tuple[Action, ...]) -> None:
        before, self.run = self.run, leader.supervisor.run
        if self.history.keep_history:
            self._note(leader, event, actions)
        self.laws.check_decision(leader, event, actions, before)
        self._trigger_faults(event, before)

    def _trigger_faults(self, event: Event, before: Run) -> None:
        """Record and start the faults that wait for this event."""
        match event:
            case StragglerFound():
                self.took_effect("slow")
            case HostFlagged() | HostLeaving():
                self.took_effect("drain")
            case HangDetected():
                callbacks, self.at_next_hang = self.at_next_hang, []
                for resume_hung in callbacks:
                    resume_hung()
            case _:
                pass
        if self.run.interruption.findings is not None and before.interruption.findings is None:
            callback, self.at_next_failure = self.at_next_failure, None
            if callback is not None:
                callback()

    def _note(self, leader: "LeaderProcess", event: Event, actions: tuple[Action, ...]) -> None:
        at = f"{leader.host.name}*"
        words = str(event)
        if isinstance(event, (JobSubmitted, LeaderStarted, AgentRegistered)):
            host = getattr(event, "host", "")
            words = f"{type(event).__name__} {host}"
        self.history.note(at, f"{words[:180]}  [{self.run.stage.title}]")
        for action in actions:
            self.history.note(at, f"    -> {type(action).__name__}: {action.reason}")

    # The user

    def submit_job(self, launch: int) -> bool:
        """`ndctl submit`, with `--resume` from the second launch on. False: it is refused."""
        storage = self.storage
        if not self.lock_is_free or storage.full or not storage.reachable_from(LOGIN):
            return False
        storage.holder = None
        hosts = tuple(host.name for host in self.hosts.values() if host.up)
        if not self.scenario.scheduled and not hosts:
            return False
        at = EPOCH + self.timeline.now
        journal = StoredJournal(storage, LOGIN, lambda: None)
        supervisor = Supervisor(journal, self.decide)
        before = supervisor.run
        event = submission_event(self.scenario, hosts, at, launch)
        event = replace(event, plan_number=self.add_plan(event.plan))
        if launch > 1:
            event = replace(event, reached=storage.reached)
            self.training_faults.clear()
        supervisor.feed(event)
        self.run = supervisor.run
        self.history.note("user", f"submits the job, launch {launch}")
        self.laws.job_submitted(before, event)
        if self.scenario.scheduled:
            self.scheduler.submit(launch)
        else:
            self._start_local(launch)
        return True

    def _start_local(self, launch: int) -> None:
        for host in self.hosts.values():
            host.end_agents()
        for name in self.job.hosts:
            host = self.hosts[name]
            if host.up and not host.agent_never_starts:
                agent = self.start_agent(self, host, launch, 0, lead=name == self.job.leader)
                host.agents.append(agent)

    @property
    def needs_resubmission(self) -> bool:
        """No process leads the job or will lead it, so a user must resubmit it."""
        if not self.lock_is_free:
            return False
        if self.scenario.scheduled:
            return not self.scheduler.has_job
        return not any(agent.alive for host in self.hosts.values() for agent in host.agents)

    @property
    def ended(self) -> bool:
        return isinstance(self.run.stage, Ended)
