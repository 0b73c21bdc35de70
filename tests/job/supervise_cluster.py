"""A cluster in memory that obeys the supervisor, mostly, and a witness of what must always hold."""

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
from tests.job.supervise_stage import START, error, exited, found, host, plan, submitted


@dataclass
class Witness:
    """Feeds `step` and checks after each event what must always be true."""

    run: Run = field(default_factory=Run)
    entries: list[Entry] = field(default_factory=list)
    open: set[str] = field(default_factory=set)
    """Hosts of the present attempt of which nobody has said that no rank is left."""
    left: dict[str, int] = field(default_factory=dict)
    """Host whose agent came back with ranks -> the attempt that they are of."""
    starts: int = 0
    """Attempts since the last sign of progress."""
    started: int = 0

    def tell(self, event: Event) -> tuple[Action, ...]:
        before = self.run
        self.run, actions = step(before, event)
        assert step(before, event) == (self.run, actions), "the same question, the same answer"
        entry = Entry(seq=len(self.entries) + 1, event=event, actions=actions)
        assert from_line(to_line(entry).removesuffix(b"\n")) == entry
        self.entries.append(entry)
        self._closes(event, before)
        self._counts(event, before)
        for action in actions:
            self._lawful(action, before, event)
        self._sound()
        return actions

    def _closes(self, event: Event, before: Run) -> None:
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
                self._comes(event, before)
            case Tick() if self.run is not before:
                self.open -= {n for n, known in self.run.hosts.by_name.items() if not known.alive}
            case _:
                pass

    def _comes(self, event: AgentRegistered, before: Run) -> None:
        name, known = event.host, before.hosts.by_name.get(event.host)
        if event.running and not isinstance(before.stage, OUTSIDE) and not (known and known.alive):
            self.left[name] = event.running
        if known is not None and known.pid != event.pid:
            self.open.discard(name)
            if not event.running:  # it has the host's lock, so no rank holds it
                self.left.pop(name, None)
        elif isinstance(before.stage, Stopping) and known and not known.alive:
            self.open |= {name} & set(before.attempt.placement)  # given up, but it lives

    def _counts(self, event: Event, before: Run) -> None:
        if (
            self.run.interruption.leaving
            and not before.interruption.leaving
            and isinstance(before.stage, ATTEMPT)
        ):
            self.starts -= 1  # to leave when a scheduler asks is no failure
        match event:
            case JobSubmitted():
                self.starts = 0
            case CheckpointSaved() if self.run.progress.saved > before.progress.saved:
                self.starts = 0
            case TrainingResumed() if self.run.progress.saved > before.progress.saved:
                self.starts = min(self.starts, 1)
            case _:
                pass

    def _lawful(self, action: Action, before: Run, event: Event) -> None:
        if isinstance(before.stage, Ended):
            assert isinstance(action, EndJob), f"{action} after the end"
        if isinstance(action, StartAttempt):
            assert not self.open, f"ranks may be left on {self.open}"
            assert not set(action.hosts) & set(self.left), f"{self.left} have not ended"
            assert action.attempt == self.started + 1
            assert all(self.run.hosts.by_name[name].alive for name in action.hosts)
            assert len(set(action.hosts)) == len(action.hosts)
            assert not set(action.hosts) & set(self.run.hosts.exclude), "a host that is left out"
            assert not any(self.run.hosts.by_name[name].unfit for name in action.hosts)
            assert len(action.hosts) == len(self.run.plan.hosts)
            self.started, self.open = action.attempt, set(action.hosts)
            self.starts += 1
        if isinstance(action, Requeue):
            assert not self.open, f"given back while ranks may be left on {self.open}"
            assert self.run.scheduler.allocation is not None
        if isinstance(action, ReplaceAgent) and isinstance(event, AgentLost):
            replaced = [a.host for a in self.entries[-1].actions if isinstance(a, ReplaceAgent)]
            assert replaced.count(action.host) == 1

    def _sound(self) -> None:
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
    """Hosts, agents and ranks; `calm` once nothing breaks any more."""

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
        self.witness = Witness()
        self.names = tuple(host(n) for n in range(hosts + spares))
        self.pids = dict.fromkeys(self.names, 1)
        self.ranks: dict[str, int] = {}
        """Host -> attempt whose ranks run there."""
        self.stuck: set[str] = set()
        self.mail: list[Event] = []
        self.more = {"hosts": hosts, "spares": spares, **more}
        self.scheduled, self.restarts, self.queued = scheduled, 0, False
        self.successor_s, self.successors = successor_s, 0
        """Hosts that came in the place of others are numbered from 1000."""
        self.submits()

    @property
    def run(self) -> Run:
        return self.witness.run

    @property
    def over(self) -> bool:
        return isinstance(self.run.stage, Ended)

    def chance(self, percent: int) -> bool:
        return not self.calm and self.random.randrange(100) < percent

    def submits(self, resume: bool = False) -> None:
        self.witness.tell(submitted(at=self.at, resume=resume, **self.more))
        self.leads()

    def leads(self) -> None:
        """A new leader; the ranks and the agents of the former one are gone."""
        self.mail, self.ranks, self.stuck = [], {}, set()
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
            self.appears(name)

    def runs_again(self) -> None:
        """The scheduler found hosts for a job in its queue: others than those it was without."""
        self.restarts += 1
        unwanted = set(self.run.hosts.exclude)
        unwanted |= {name for name, known in self.run.hosts.by_name.items() if known.unfit}
        fresh = (host(n) for n in range(100 * self.restarts, 100 * self.restarts + 100))
        self.names = tuple(next(fresh) if name in unwanted else name for name in self.names)
        self.pids = {name: self.pids.get(name, 1) for name in self.names}
        self.leads()

    def replanned(self, hosts: int) -> Event:
        if self.chance(30):
            return ReplanRefused(at=self.at, hosts=hosts, why="the batch does not divide")
        return Replanned(at=self.at, plan=plan(hosts), plan_number=2)

    def appears(self, name: str, running: int = 0) -> None:
        self.mail.append(
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
        for action in self.witness.tell(replace(event, at=self.at)):
            self.obey(action)

    def obey(self, action: Action) -> None:  # noqa: C901 - one line for each action
        match action:
            case StartAttempt(attempt=attempt, hosts=hosts):
                self.ranks |= dict.fromkeys(hosts, attempt)
            case StopAttempt(attempt=attempt, hosts=hosts):
                for name in hosts or self.run.attempt.placement:
                    if name not in self.stuck:
                        self.stops(name, attempt, finished=False)
            case GatherEvidence(attempt=attempt):
                self.shows(attempt)
            case JudgeHang(attempt=attempt):
                if self.chance(80):
                    self.mail.append(self._judged(attempt))
            case ReplaceAgent(host=name, elsewhere=elsewhere) if elsewhere or (
                self.successor_s is not None and self.chance(50)
            ):
                self.succeeds(name)
            case ReplaceAgent(host=name):
                self.replaces(name)
            case CheckHosts() | Replan() | Requeue():
                self.arranges(action)
            case EndJob():
                self.ranks = {}
            case _:
                assert_never(action)

    def replaces(self, name: str) -> None:
        self.ranks.pop(name, None)
        self.stuck.discard(name)
        if name in self.names and not self.chance(20):
            self.pids[name] += 1
            self.appears(name)
        elif self.chance(50):
            gone = "the scheduler says that it is down"
            self.mail.append(HostUnavailable(at=self.at, host=name, why=gone))

    def succeeds(self, name: str) -> None:
        """Another host comes in the place of this one, whose agent is gone by then."""
        assert self.successor_s is not None
        if name not in self.names:
            return
        attempt = self.ranks.get(name)
        if attempt is not None:
            self.stops(name, attempt, finished=False)
        self.stuck.discard(name)
        self.mail.append(self._lost(name))
        self.successors += 1
        fresh = host(1000 + self.successors)
        self.names = tuple(fresh if one == name else one for one in self.names)
        self.pids[fresh] = 1
        self.appears(fresh)

    def arranges(self, action: CheckHosts | Replan | Requeue) -> None:
        match action:
            case CheckHosts(check=check):
                self.mail.append(HostsChecked(at=self.at, check=check, unfit={}))
            case Replan(hosts=hosts):
                self.mail.append(self.replanned(hosts))
            case Requeue():
                self.ranks, self.queued = {}, True

    def stops(self, name: str, attempt: int, *, finished: bool) -> None:
        self.ranks.pop(name, None)
        self.mail.append(HostStopped(at=self.at, attempt=attempt, host=name, finished=finished))

    def shows(self, attempt: int) -> None:
        for name in sorted(set(self.run.attempt.placement) - self.stuck):
            ranks = () if self.chance(30) else (found(0), found(1, stack=()))
            self.mail.append(EvidenceGathered(at=self.at, attempt=attempt, host=name, ranks=ranks))

    def deliver(self) -> None:
        """One piece of news: seldom in order, sometimes twice, rarely never."""
        late = self.random.randrange(len(self.mail)) if self.chance(30) else 0
        event = self.mail[late] if self.chance(15) else self.mail.pop(late)
        self.tell(event)

    def passes(self, seconds: float) -> None:
        self.at += seconds
        self.tell(Tick(at=self.at))

    # What breaks

    def break_something(self) -> None:  # noqa: C901 - one line or two for each fault
        attempt, name = self.run.attempt.number, self.random.choice(self.names)
        if self.scheduled and self.chance(25):
            self.interfere(name)
            return
        match self.random.randrange(9):
            case 0:  # a rank dies
                self.mail.append(exited(self.random.randrange(4), attempt))
            case 1:
                text = self.random.choice(["a", "b", "Connection closed by peer"])
                at_step = self.random.randrange(3)
                more: dict[str, Any] = {"error": error(text, at_step=at_step), "exit_code": 1}
                self.mail.append(exited(self.random.randrange(4), attempt, **more))
            case 2:  # an agent dies with its ranks
                self.ranks.pop(name, None)
                self.mail.append(self._lost(name))
            case 3:  # an agent is taken for dead, and is back
                self.mail.append(self._lost(name))
                self.appears(name, self.ranks.get(name, 0))
            case 4:
                self.stuck.add(name)
                self.mail.append(self._hang(attempt))
            case 5:
                self.stops(name, attempt, finished=self.chance(30))
            case 6:
                self.pids[name] += 1
                self.appears(name)
            case 7 if self.chance(20):
                self.leads()
            case 8 if self.chance(20):
                self.mail.append(CancelRequested(at=self.at, by="ann"))
            case _:
                self.passes(self.random.choice([1.0, 10.0, 50.0]))

    def interfere(self, name: str) -> None:
        """What a scheduler does to a job."""
        match self.random.randrange(3 if self.successor_s is None else 4):
            case 3:
                self.mail.append(HostLeaving(at=self.at, host=name, why="SIGTERM"))
                self.mail.append(self._lost(name))
                self.pids[name] += 1
                self.ranks.pop(name, None)
                self.appears(name)
            case 0:
                causes: tuple[Cause, ...] = ("preempted", "time-limit", "requeued", "unknown")
                self.tell(LeaveAsked(at=self.at, cause=None, words="SIGTERM"))
                cause = "cancelled" if self.chance(10) else self.random.choice(causes)
                self.mail.append(LeaveAsked(at=self.at, cause=cause, words="SIGTERM"))
            case 1:
                flagged = HostFlagged(at=self.at, host=name, state="DRAINING", reason="a fan")
                self.mail.append(flagged)
            case _:
                unfit = {name: "slow"} if self.chance(50) else {}
                self.mail.append(HostsChecked(at=self.at, check=self.run.hosts.checks, unfit=unfit))

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
        blamed = self.chance(50)
        return HangJudged(
            at=self.at,
            attempt=attempt,
            verdict="never-entered" if blamed else "not-known",
            cause="others wait for it" if blamed else "nobody stands out",
            scope="rank" if blamed else None,
            ranks=(0,) if blamed else (),
            hosts=(self.run.attempt.placement[0],) if blamed else (),
            confidence=0.95 if blamed else 0.0,
        )

    # What goes well

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

    def finishes(self) -> None:
        """No trouble any more: what still runs comes to its end, one way or another."""
        attempt = self.run.attempt.number
        if self.queued:
            self.runs_again()
        elif self.mail:
            self.deliver()
        elif isinstance(self.run.stage, Starting | Running):
            if self.stuck & set(self.run.attempt.placement):
                self.tell(self._hang(attempt))
            else:
                for name in self.run.attempt.placement:
                    self.stops(name, attempt, finished=True)
        else:
            self.passes(100.0)

    def play(self, turns: int) -> None:
        """Adversity for `turns`, then calm until the job has ended."""
        for _ in range(turns):
            if self.over:
                return
            self.at += self.random.random()
            if self.queued:
                self.runs_again()
            elif self.mail and self.random.randrange(3):
                self.deliver()
            elif isinstance(self.run.stage, Starting | Running) and self.random.randrange(2):
                self.trains()
            else:
                self.break_something()
        self.calm = True
        for _ in range(500):
            if self.over:
                return
            self.finishes()
        raise AssertionError(f"the job does not end: {self.run.stage}, {self.run.stage.reason}")
