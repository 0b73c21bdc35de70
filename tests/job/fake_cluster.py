"""A cluster in memory that follows the supervisor's actions, with random faults, and its laws."""

from dataclasses import dataclass, field
from random import Random
from typing import Any, assert_never, get_args

from msgspec.structs import replace

from orchestrator.contract.launch import Allocation, Cause
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
from orchestrator.contract.messages.events import (
    AgentLost,
    AgentRegistered,
    CancelRequested,
    CheckpointSaved,
    Event,
    EvidenceGathered,
    HangDetected,
    HangJudged,
    HostFlagged,
    HostLeaving,
    HostsChecked,
    HostStopped,
    HostUnavailable,
    JobSubmitted,
    LeaderStarted,
    LeaveAsked,
    Replanned,
    ReplanRefused,
    StepReached,
    Tick,
    TrainingResumed,
)
from orchestrator.job.stage import ATTEMPT, OUTSIDE, Ended, Running, Starting, State, Stopping
from orchestrator.job.state import Run
from orchestrator.job.transitions import step
from orchestrator.journal.journal import Entry, from_line, to_line
from tests.job.job_driver import START, error, exited, found, host, plan, submitted


@dataclass
class LawChecker:
    """Passes events to `step`, and checks after each event what must always hold."""

    run: Run = field(default_factory=Run)
    entries: list[Entry] = field(default_factory=list)
    open: set[str] = field(default_factory=set)
    """Hosts of the present attempt that may still run ranks."""
    left: dict[str, int] = field(default_factory=dict)
    """Host whose agent came back with ranks -> attempt of these ranks."""
    starts: int = 0
    """Attempts since the last progress."""
    started: int = 0

    def tell(self, event: Event) -> tuple[Action, ...]:
        before = self.run
        self.run, actions = step(before, event)
        assert step(before, event) == (self.run, actions), "`step` is deterministic"
        entry = Entry(seq=len(self.entries) + 1, event=event, actions=actions)
        assert from_line(to_line(entry).removesuffix(b"\n")) == entry
        self.entries.append(entry)
        self._update_open_hosts(event, before)
        self._count_starts(event, before)
        for action in actions:
            self._check_action(action, before, event)
        self._check_state()
        return actions

    def _update_open_hosts(self, event: Event, before: Run) -> None:
        match event:
            case JobSubmitted() | LeaderStarted():
                self.open.clear()
                self.left.clear()
            case AgentLost(host=name):
                self.open.discard(name)
                self.left.pop(name, None)
            case HostStopped(host=name, attempt=attempt) if self.left.get(name) == attempt:
                self.left.pop(name)
                self.open.discard(name)
            case HostStopped(host=name, attempt=attempt) if attempt == before.attempt.number:
                self.open.discard(name)
            case AgentRegistered():
                self._agent_registers(event, before)
            case Tick() if self.run is not before:
                self.open -= {n for n, known in self.run.hosts.by_name.items() if not known.alive}
            case _:
                pass

    def _agent_registers(self, event: AgentRegistered, before: Run) -> None:
        name, known = event.host, before.hosts.by_name.get(event.host)
        if event.running and not isinstance(before.stage, OUTSIDE) and not (known and known.alive):
            self.left[name] = event.running
        if known is not None and known.pid != event.pid:
            self.open.discard(name)
            if not event.running:  # the new agent holds the lock of the host, so no rank does
                self.left.pop(name, None)
        elif isinstance(before.stage, Stopping) and known and not known.alive:
            self.open |= {name} & set(
                before.attempt.placement
            )  # it was given up as lost but is alive, and so are its ranks

    def _count_starts(self, event: Event, before: Run) -> None:
        if (
            self.run.interruption.leaving
            and not before.interruption.leaving
            and isinstance(before.stage, ATTEMPT)
        ):
            self.starts -= 1  # an attempt that leaves at the scheduler's request is no failure
        match event:
            case JobSubmitted():
                self.starts = 0
            case CheckpointSaved() if self.run.progress.saved > before.progress.saved:
                self.starts = 0
            case TrainingResumed() if self.run.progress.saved > before.progress.saved:
                self.starts = min(self.starts, 1)
            case _:
                pass

    def _check_action(self, action: Action, before: Run, event: Event) -> None:
        if isinstance(before.stage, Ended):
            assert isinstance(action, EndJob), f"{action} after the end"
        if isinstance(action, StartAttempt):
            assert not self.open, f"ranks may be left on {self.open}"
            assert not set(action.hosts) & set(self.left), f"{self.left} have not ended"
            assert action.attempt == self.started + 1
            assert all(self.run.hosts.by_name[name].alive for name in action.hosts)
            assert len(set(action.hosts)) == len(action.hosts)
            assert not set(action.hosts) & set(self.run.hosts.exclude), "an excluded host"
            assert not any(self.run.hosts.by_name[name].unfit for name in action.hosts)
            assert len(action.hosts) == len(self.run.plan.hosts)
            self.started, self.open = action.attempt, set(action.hosts)
            self.starts += 1
        if isinstance(action, Requeue):
            assert not self.open, f"requeued while ranks may be left on {self.open}"
            assert self.run.scheduler.allocation is not None
        if isinstance(action, ReplaceAgent) and isinstance(event, AgentLost):
            replaced = [a.host for a in self.entries[-1].actions if isinstance(a, ReplaceAgent)]
            assert replaced.count(action.host) == 1

    def _check_state(self) -> None:
        run = self.run
        assert run.state in get_args(State)
        assert run.job is not None
        assert self.starts <= run.job.max_restarts + 1
        assert run.history.fruitless <= run.job.max_restarts
        assert [i.id for i in run.history.incidents] == list(
            range(1, len(run.history.incidents) + 1)
        )
        for incident in run.history.incidents:
            assert incident.detected_after_s >= 0
            assert (incident.recovered_after_s or 0.0) >= 0
        assert (run.ending is None) == (not isinstance(run.stage, Ended))


class Cluster:
    """Hosts, agents and ranks. Random faults happen until `calm` is true."""

    def __init__(
        self,
        random: Random,
        hosts: int = 2,
        spares: int = 0,
        *,
        scheduled: bool = False,
        successor_s: float | None = None,
        **more: Any,
    ) -> None:
        self.random, self.at, self.calm = random, START, False
        self.checker = LawChecker()
        self.names = tuple(host(n) for n in range(hosts + spares))
        self.pids = dict.fromkeys(self.names, 1)
        self.ranks: dict[str, int] = {}
        """Host -> attempt whose ranks run there."""
        self.stuck: set[str] = set()
        self.undelivered: list[Event] = []
        self.more = {"hosts": hosts, "spares": spares, **more}
        self.scheduled, self.restarts, self.queued = scheduled, 0, False
        self.successor_s, self.successors = successor_s, 0
        """Number of replacement hosts so far; they are numbered from 1000."""
        self.submits()

    @property
    def run(self) -> Run:
        return self.checker.run

    @property
    def over(self) -> bool:
        return isinstance(self.run.stage, Ended)

    def chance(self, percent: int) -> bool:
        return not self.calm and self.random.randrange(100) < percent

    def submits(self, resume: bool = False) -> None:
        self.checker.tell(submitted(at=self.at, resume=resume, **self.more))
        self.leads()

    def leads(self) -> None:
        """A new leader starts; the agents and ranks of the old one are gone."""
        self.undelivered, self.ranks, self.stuck = [], {}, set()
        self.pids = {name: pid + 1 for name, pid in self.pids.items()}
        allocation = None
        if self.scheduled:
            allocation = Allocation(
                id="7", restarts=self.restarts, hosts=self.names, successor_s=self.successor_s
            )
        self.queued = False
        pid = self.pids[self.names[0]]
        self.tell(LeaderStarted(at=self.at, host=self.names[0], pid=pid, allocation=allocation))
        for name in self.names:
            self.agent_registers(name)

    def next_allocation(self) -> None:
        """The scheduler starts the queued job on hosts that are not excluded."""
        self.restarts += 1
        unwanted = set(self.run.hosts.exclude)
        unwanted |= {name for name, known in self.run.hosts.by_name.items() if known.unfit}
        new_hosts = (host(n) for n in range(100 * self.restarts, 100 * self.restarts + 100))
        self.names = tuple(next(new_hosts) if name in unwanted else name for name in self.names)
        self.pids = {name: self.pids.get(name, 1) for name in self.names}
        self.leads()

    def replanned(self, hosts: int) -> Event:
        if self.chance(30):
            return ReplanRefused(at=self.at, hosts=hosts, why="the batch does not divide")
        return Replanned(at=self.at, plan=plan(hosts), plan_number=2)

    def agent_registers(self, name: str, running: int = 0) -> None:
        self.undelivered.append(
            AgentRegistered(
                at=self.at,
                host=name,
                address="::1",
                devices=2,
                pid=self.pids[name],
                incarnation=str(self.pids[name]),
                running=running,
            )
        )

    def tell(self, event: Event) -> None:
        for action in self.checker.tell(replace(event, at=self.at)):
            self.perform(action)

    def perform(self, action: Action) -> None:  # noqa: C901 - one line for each action
        match action:
            case StartAttempt(attempt=attempt, hosts=hosts):
                self.ranks |= dict.fromkeys(hosts, attempt)
            case StopAttempt(attempt=attempt, hosts=hosts):
                for name in hosts or self.run.attempt.placement:
                    if name not in self.stuck:
                        self.stops(name, attempt, finished=False)
            case GatherEvidence(attempt=attempt):
                self.send_evidence(attempt)
            case SaveCheckpoint():
                pass  # a periodic checkpoint is as good
            case JudgeHang(attempt=attempt):
                if self.chance(80):
                    self.undelivered.append(self._judged(attempt))
            case ReplaceAgent(host=name, elsewhere=elsewhere) if elsewhere or (
                self.successor_s is not None and self.chance(50)
            ):
                self.replace_host(name)
            case ReplaceAgent(host=name):
                self.replace_agent(name)
            case CheckHosts() | Replan() | Requeue():
                self.perform_on_job(action)
            case EndJob():
                self.ranks = {}
            case _:
                assert_never(action)

    def replace_agent(self, name: str) -> None:
        self.ranks.pop(name, None)
        self.stuck.discard(name)
        if name in self.names and not self.chance(20):
            self.pids[name] += 1
            self.agent_registers(name)
        elif self.chance(50):
            gone = "the scheduler says that it is down"
            self.undelivered.append(HostUnavailable(at=self.at, host=name, why=gone))

    def replace_host(self, name: str) -> None:
        """Another host replaces this one, and the agent of this one is lost."""
        assert self.successor_s is not None
        if name not in self.names:
            return
        attempt = self.ranks.get(name)
        if attempt is not None:
            self.stops(name, attempt, finished=False)
        self.stuck.discard(name)
        self.undelivered.append(self._lost(name))
        self.successors += 1
        new_hosts = host(1000 + self.successors)
        self.names = tuple(new_hosts if one == name else one for one in self.names)
        self.pids[new_hosts] = 1
        self.agent_registers(new_hosts)

    def perform_on_job(self, action: CheckHosts | Replan | Requeue) -> None:
        match action:
            case CheckHosts(check=check):
                self.undelivered.append(HostsChecked(at=self.at, check=check, unfit={}))
            case Replan(hosts=hosts):
                self.undelivered.append(self.replanned(hosts))
            case Requeue():
                self.ranks, self.queued = {}, True

    def stops(self, name: str, attempt: int, *, finished: bool) -> None:
        self.ranks.pop(name, None)
        self.undelivered.append(
            HostStopped(at=self.at, attempt=attempt, host=name, finished=finished)
        )

    def send_evidence(self, attempt: int) -> None:
        for name in sorted(set(self.run.attempt.placement) - self.stuck):
            ranks = () if self.chance(30) else (found(0), found(1, stack=()))
            self.undelivered.append(
                EvidenceGathered(at=self.at, attempt=attempt, host=name, ranks=ranks)
            )

    def deliver(self) -> None:
        """Deliver one event: sometimes out of order, sometimes twice."""
        late = self.random.randrange(len(self.undelivered)) if self.chance(30) else 0
        event = self.undelivered[late] if self.chance(15) else self.undelivered.pop(late)
        self.tell(event)

    def pass_time(self, seconds: float) -> None:
        self.at += seconds
        self.tell(Tick(at=self.at))

    # Faults

    def break_something(self) -> None:  # noqa: C901 - one line or two for each fault
        attempt, name = self.run.attempt.number, self.random.choice(self.names)
        if self.scheduled and self.chance(25):
            self.scheduler_fault(name)
            return
        match self.random.randrange(9):
            case 0:  # a rank dies
                self.undelivered.append(exited(self.random.randrange(4), attempt))
            case 1:
                text = self.random.choice(["a", "b", "Connection closed by peer"])
                at_step = self.random.randrange(3)
                more: dict[str, Any] = {"error": error(text, at_step=at_step), "exit_code": 1}
                self.undelivered.append(exited(self.random.randrange(4), attempt, **more))
            case 2:  # an agent dies with its ranks
                self.ranks.pop(name, None)
                self.undelivered.append(self._lost(name))
            case 3:  # an agent is declared lost, and comes back
                self.undelivered.append(self._lost(name))
                self.agent_registers(name, self.ranks.get(name, 0))
            case 4:
                self.stuck.add(name)
                self.undelivered.append(self._hang(attempt))
            case 5:
                self.stops(name, attempt, finished=self.chance(30))
            case 6:
                self.pids[name] += 1
                self.agent_registers(name)
            case 7 if self.chance(20):
                self.leads()
            case 8 if self.chance(20):
                self.undelivered.append(CancelRequested(at=self.at, by="ann"))
            case _:
                self.pass_time(self.random.choice([1.0, 10.0, 50.0]))

    def scheduler_fault(self, name: str) -> None:
        """A fault or request of the scheduler."""
        match self.random.randrange(3 if self.successor_s is None else 4):
            case 3:
                self.undelivered.append(HostLeaving(at=self.at, host=name, why="SIGTERM"))
                self.undelivered.append(self._lost(name))
                self.pids[name] += 1
                self.ranks.pop(name, None)
                self.agent_registers(name)
            case 0:
                causes: tuple[Cause, ...] = ("preempted", "time-limit", "requeued", "unknown")
                self.tell(LeaveAsked(at=self.at, cause=None, words="SIGTERM"))
                cause = "cancelled" if self.chance(10) else self.random.choice(causes)
                self.undelivered.append(LeaveAsked(at=self.at, cause=cause, words="SIGTERM"))
            case 1:
                down = self.chance(30)
                state = "DOWN" if down else "DRAINING"
                flagged = HostFlagged(at=self.at, host=name, state=state, reason="a fan", down=down)
                self.undelivered.append(flagged)
            case _:
                unfit = {name: "slow"} if self.chance(50) else {}
                self.undelivered.append(
                    HostsChecked(at=self.at, check=self.run.hosts.checks, unfit=unfit)
                )

    def _lost(self, name: str) -> AgentLost:
        return AgentLost(at=self.at, host=name, why="it said nothing", silent_s=2.0)

    def _hang(self, attempt: int) -> HangDetected:
        return HangDetected(
            at=self.at,
            attempt=attempt,
            phase="train",
            step=1,
            stalled_s=11.0,
            limit_s=10.0,
            behind=(),
        )

    def _judged(self, attempt: int) -> HangJudged:
        has_culprit = self.chance(50)
        return HangJudged(
            at=self.at,
            attempt=attempt,
            verdict="never-entered" if has_culprit else "not-known",
            cause="the other ranks wait for it" if has_culprit else "no rank stands out",
            scope="rank" if has_culprit else None,
            ranks=(0,) if has_culprit else (),
            hosts=(self.run.attempt.placement[0],) if has_culprit else (),
            confidence=0.95 if has_culprit else 0.0,
        )

    # Progress

    def trains(self) -> None:
        attempt, saved = self.run.attempt.number, self.run.progress.saved
        if isinstance(self.run.stage, Starting):
            resumed = saved + self.random.randrange(2) if self.chance(10) else saved
            self.tell(TrainingResumed(at=self.at, attempt=attempt, step=resumed))
        number = max(self.run.attempt.step, self.run.progress.saved) + 1
        self.tell(
            StepReached(at=self.at, attempt=attempt, step=number, loss=1.0, tokens_per_second=None)
        )
        if self.chance(30):
            self.tell(CheckpointSaved(at=self.at, attempt=attempt, step=number))

    def end_quietly(self) -> None:
        """Without faults: deliver what is left, or let ranks finish, or let time pass."""
        attempt = self.run.attempt.number
        if self.queued:
            self.next_allocation()
        elif self.undelivered:
            self.deliver()
        elif isinstance(self.run.stage, Starting | Running):
            if self.stuck & set(self.run.attempt.placement):
                self.tell(self._hang(attempt))
            else:
                for name in self.run.attempt.placement:
                    self.stops(name, attempt, finished=True)
        else:
            self.pass_time(100.0)

    def play(self, turns: int) -> None:
        """Random faults for `turns`, then none until the job has ended."""
        for _ in range(turns):
            if self.over:
                return
            self.at += self.random.random()
            if self.queued:
                self.next_allocation()
            elif self.undelivered and self.random.randrange(3):
                self.deliver()
            elif isinstance(self.run.stage, Starting | Running) and self.random.randrange(2):
                self.trains()
            else:
                self.break_something()
        self.calm = True
        for _ in range(500):
            if self.over:
                return
            self.end_quietly()
        raise AssertionError(f"the job does not end: {self.run.stage}, {self.run.stage.reason}")
