"""An agent as `agent/agent.py` behaves, in a process that may lead too (`backends/entry/agent.py`).

It differs in time alone: it looks for its leader each second, and what takes it milliseconds takes
it none. Pulses and digests come with the leader's look at the clock (`leaders.py`).
"""

from collections import deque
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, assert_never, cast

from orchestrator.contract.files import exit_codes
from orchestrator.contract.messages.agent_protocol import (
    Checked,
    CheckFabric,
    Digest,
    Evidence,
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
)
from orchestrator.contract.messages.events import (
    AgentRegistered,
    EvidenceGathered,
    HostLeaving,
    HostStopped,
)
from orchestrator.simulation.leaderless import Leaderless, SeeingToTheLeader
from orchestrator.simulation.world.network import Line
from orchestrator.simulation.world.ranks import HostRanks
from orchestrator.simulation.world.training import Word

if TYPE_CHECKING:
    from orchestrator.simulation.leaders import Leader
    from orchestrator.simulation.world.hosts import Host
    from orchestrator.simulation.world.scheduler import Scheduler
    from orchestrator.simulation.world.world import World

LEAVE_GRACE_S = 3.0
FIND_LEADER_S = 60.0
FIND_ALLOCATED_S = 300.0
HEARD_S = 5.0
SEEK_S = 1.0
HOLD_POLL_S = 1.0
HOLD_S = 60.0
"""For a former agent of the host, or its ranks, to be gone."""
CHECK_TAKES_S = 2.0
RESET_S = 0.1
"""For the other end to see that a process that had a connection is gone."""


class Agent:
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
        self.lead = lead
        """From its beginning."""
        self.leader: Leader | None = None
        self.leaderless: Leaderless | None = None
        """While it sees to a job whose leader is gone."""
        self.incarnation = f"{host.name}.{world.drawn()}"
        self.ranks: HostRanks | None = None
        self.unheeded = ""
        """The last signal of the scheduler since a leader was heard."""
        self.ended: HostStopped | None = None
        self.alone_since: float | None = None
        """When the leader was last heard, if that attempt was stopped for its silence."""
        self.outbox: deque[Report] = deque()
        self.line: Line | None = None
        self.talks_to: Leader | None = None
        self.last_heard = world.timeline.now
        allocated = world.scenario.scheduled and world.scenario.successor_s is None
        finds_s = FIND_ALLOCATED_S if allocated else FIND_LEADER_S
        self.patience = max(finds_s, world.job.agent_timeout)
        self.alive = True
        self.holds = False
        """It is the only agent of its host, with no rank of a former one left."""
        self.leaving = False
        self.checks: dict[int, Checked | None] = {}
        self.going = False
        """The scheduler ends it alone."""
        world.timeline.after(0.0, partial(self._hold, world.timeline.now))
        if world.scenario.successor_s is not None and not lead:
            SeeingToTheLeader(world, self, turn).wait()

    # Its beginning

    def _hold(self, begun: float) -> None:
        if not self.alive:
            return
        now = self.world.timeline.now
        others = [a for a in self.host.agents if a is not self and a.alive and a.holds]
        if others or self.host.ranks:
            if now - begun > HOLD_S:
                self.exit(exit_codes.NOT_ADMITTED)
            else:
                self.world.timeline.after(HOLD_POLL_S, partial(self._hold, begun))
            return
        self.holds, self.last_heard = True, now
        if self.lead:
            self.world.becomes_leader(self)
        self._seek()

    def _seek(self) -> None:
        """Look for the leader until there is a line to it, or for too long."""
        if not self.alive or self.leaving:
            return
        timeline = self.world.timeline
        if self.line is not None and not self._lost_patience(self.world.job.agent_timeout):
            timeline.after(self.world.job.agent_timeout / 2, self._seek)
            return
        if self.line is not None:
            self._hang_up()
        if self._lost_patience(self.patience):
            if self.ranks is not None and not self.ranks.stopping:
                self.alone_since = self.last_heard
                self.ranks.stop(LEAVE_GRACE_S)
            if self._outlives():
                self._see_to_the_job()
            elif self._lost_patience(self.patience + (self.world.scenario.successor_s or 0.0)):
                self.world.history.note(self.host.name, "no word from the leader: leaving")
                self.leave(exit_codes.LEADER_LOST)
                return
        self._find()
        timeline.after(SEEK_S, self._seek)

    def _lost_patience(self, limit: float) -> bool:
        return self.world.timeline.now - self.last_heard > limit

    def _outlives(self) -> bool:
        """Whether it stays when its leader is gone, for another to lead, or to lead itself."""
        scenario = self.world.scenario
        return scenario.scheduled and scenario.successor_s is None and not self.lead

    @property
    def is_alone(self) -> bool:
        """No leader was heard for too long, and no rank is left here."""
        return not self.leaving and self.ranks is None and self._lost_patience(self.patience)

    def _see_to_the_job(self) -> None:
        if self.leaderless is None and self.leader is None and self.is_alone:
            scheduler = cast("Scheduler", self.world.scheduler)
            self.leaderless = Leaderless(self.world, self, scheduler, self._saw_to_the_job)
            self.leaderless.ask()

    def _saw_to_the_job(self) -> None:
        self.leaderless = None

    def _find(self) -> None:
        said = self.world.storage.announced()
        ours = said is not None and (said.launch, said.restarts) == (self.launch, self.restarts)
        if said is None or not ours or not self.world.storage.serves(self.host.name):
            return
        if said.over:
            self.leave(exit_codes.OK)
            return
        leader = self.world.leaders.get(said.leader)
        if leader is None or not leader.serves or not self._reaches(leader):
            return
        self.line, self.talks_to = Line(self.host.name, leader.host.name), leader
        self.line.broken = partial(self._broken, self.line)
        self.last_heard, self.patience = self.world.timeline.now, self.world.job.agent_timeout
        self._send(self._register())
        self._repeat_ends()
        while self.outbox:
            self._send(self.outbox.popleft())

    def _reaches(self, leader: "Leader") -> bool:
        return self.world.network.reaches(self.host.name, leader.host.name)

    def _register(self) -> Register:
        registered = AgentRegistered(
            host=self.host.name,
            address=self.host.name,
            devices=self.world.scenario.ranks_per_host,
            pid=1,
            incarnation=self.incarnation,
            findings=self.host.findings,
            running=0 if self.ranks is None else self.ranks.attempt,
        )
        return Register(agent=registered, launch=self.launch, sent_at=self.host.clock.now())

    def _repeat_ends(self) -> None:
        if self.ranks is not None:
            self.outbox.extend(self.ranks.reports)
        elif self.ended is not None:
            former = self.ended
            self.outbox = deque(report for report in self.outbox if report is not former)
            self.outbox.append(self._as_of_now(self.ended))

    def _as_of_now(self, stopped: HostStopped) -> HostStopped:
        """With how long ago the leader was last heard, if it was stopped for that."""
        if self.alone_since is None or stopped.finished:
            return stopped
        return replace(stopped, alone_s=max(0.1, self.world.timeline.now - self.alone_since))

    def _hang_up(self) -> None:
        if self.line is not None:
            self.line.open = False
            if self.talks_to is not None and self._reaches(self.talks_to):
                self.talks_to.hung_up(self.line)
        self.line = None

    def _broken(self, line: Line) -> None:
        if self.talks_to is not None:
            self.talks_to.hung_up(line)
        self.lose(line)

    def lose(self, line: Line) -> None:
        """The line broke, or the leader closed it: look for another at once."""
        if self.line is line:
            self.line = None
            self.world.timeline.after(SEEK_S, self._find_again)

    def _find_again(self) -> None:
        if self.alive and not self.leaving and self.line is None:
            self._find()

    # What it says

    def report(self, report: Report) -> None:
        if not self.alive:
            return
        if self.line is None:
            self.outbox.append(report)
        else:
            self._send(report)

    def tell(self, word: Word) -> None:
        self.report(word)

    def wake(self) -> None:
        """The first step of an attempt is said at once."""
        self.report(self.digest())

    def digest(self) -> Digest:
        if self.ranks is None:
            return Digest(attempt=0, ranks=())
        return Digest(attempt=self.ranks.attempt, ranks=self.ranks.digest())

    def _send(self, report: Report) -> None:
        line, leader = self.line, self.talks_to
        if line is not None and leader is not None:
            hear = partial(leader.hear, line, self.host.name, report)
            self.world.network.send(line, self.host.name, hear)

    # What it is told

    def obey(self, line: Line, order: Order) -> None:
        if not self.alive or self.leaving or line is not self.line:
            return
        self.last_heard, self.unheeded = self.world.timeline.now, ""
        match order:
            case Pulse():
                pass
            case OfferPort():
                self.report(Port(attempt=order.attempt, port=29500))
            case CheckFabric():
                self._check(order)
            case Start():
                self._start(order)
            case Stop():
                self._stop(order)
            case Gather():
                self._gather(order)
            case Leave(again=again):
                self.leave(exit_codes.REQUEUED if again else exit_codes.OK)
            case _:
                assert_never(order)

    def _start(self, order: Start) -> None:
        if self.ranks is not None and self.ranks.attempt < order.attempt:
            self.ranks.kill()
            if self.ranks is not None:  # not all can be killed at once
                self.world.timeline.after(1.0, partial(self._start_late, order))
                return
        if self.ranks is not None or (self.ended and self.ended.attempt >= order.attempt):
            return
        self.ranks, self.alone_since = self.world.starts_ranks(self, order), None

    def _start_late(self, order: Start) -> None:
        if self.alive and not self.leaving:
            self._start(order)

    def _stop(self, order: Stop) -> None:
        if self.ranks is not None and self.ranks.attempt == order.attempt:
            self.ranks.stop(order.grace_s)
        elif self.ended is not None and self.ended.attempt == order.attempt:
            self.report(self.ended)
        else:
            self._remember(
                HostStopped(attempt=order.attempt, host=self.host.name, finished=False), tell=True
            )

    def _remember(self, stopped: HostStopped, *, tell: bool) -> None:
        if self.ended is None or self.ended.attempt < stopped.attempt:
            self.ended = stopped
        if tell:
            self.report(stopped)

    def _gather(self, order: Gather) -> None:
        running = self.ranks is not None and self.ranks.attempt == order.attempt
        event = EvidenceGathered(attempt=order.attempt, host=self.host.name, ranks=())
        evidence = Evidence(event=event)
        if self.ranks is not None and running:
            evidence = self.ranks.evidence()
        self.world.timeline.after(1.0, partial(self._gathered, evidence))

    def _gathered(self, evidence: Evidence) -> None:
        self.report(self.digest())
        self.report(evidence)

    def _check(self, order: CheckFabric) -> None:
        if order.check in self.checks:
            known = self.checks[order.check]
            if known is not None:
                self.report(known)
            return
        self.checks[order.check] = None
        self.world.timeline.after(CHECK_TAKES_S, partial(self._checked, order))

    def _checked(self, order: CheckFabric) -> None:
        deaf = tuple(host for host in order.hosts if not self.world.takes_part(self.host, host))
        found = Checked(
            check=order.check,
            host=self.host.name,
            state="waited" if deaf else "ok",
            seconds=None if deaf else 0.001,
            waited_for=deaf,
        )
        self.checks[order.check] = found
        self.report(found)

    def attempt_ended(self, ranks: HostRanks, stopped: HostStopped) -> None:
        if self.ranks is ranks:
            self.ranks = None
            self._remember(stopped, tell=self.alive)
            if self.leaving:
                self.exit(self.code)

    # Its end

    def warned(self, signal_name: str) -> None:
        """The scheduler ends it alone: it tells the leader, and goes when no rank is left."""
        if not self.going:
            self.going = True
            self.report(HostLeaving(host=self.host.name, why=signal_name))
            self._go_when_idle()

    def _go_when_idle(self) -> None:
        idle = self.ranks is None and not self.outbox
        if not self.alive or self.leaving or idle or self._lost_patience(HEARD_S):
            self.leave(exit_codes.LEADER_LOST)
        else:
            self.world.timeline.after(SEEK_S, self._go_when_idle)

    def leave(self, code: int) -> None:
        """Stop the ranks first, then go."""
        if not self.alive or self.leaving:
            return
        self.leaving, self.code = True, code
        if self.ranks is not None:
            self.ranks.stop(LEAVE_GRACE_S)
        else:
            self.exit(code)

    code = exit_codes.OK

    def exit(self, code: int) -> None:
        if self.alive:
            self._over()
            self.world.agent_left(self, code)

    def die(self, *, silently: bool = False) -> None:
        """Killed: the kernel ends its ranks too. `silently`: with its host, so nobody is told."""
        if not self.alive:
            return
        self._over(silently=silently)
        if self.ranks is not None:
            self.ranks.kill()
        if not silently:
            self.world.agent_left(self, exit_codes.FAILED)

    def _over(self, *, silently: bool = False) -> None:
        self.alive = False
        if self.line is not None and not silently:
            line, leader = self.line, self.talks_to
            if leader is not None:
                self.world.timeline.after(RESET_S, partial(leader.hung_up, line))
        self.line = None
        if self.leader is not None:
            self.leader.over(silently=silently)
