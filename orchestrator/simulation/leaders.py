"""A leader as `leader/leader.py` behaves, around the real supervisor, watch and connections.

It differs in how it looks at the clock: each second rather than each quarter, and less often while
nothing is amiss anywhere, when a look changes nothing. With the look come the pulses and digests of
that second, which a bad network may lose. It dies wherever it is told to: within a line of the
journal, between line and fence, or between two actions.
"""

import contextlib
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from orchestrator.contract.files import exit_codes
from orchestrator.contract.files.fence import Fence, GivenUp
from orchestrator.contract.messages.actions import Action, EndJob, Requeue, StartAttempt
from orchestrator.contract.messages.agent_protocol import (
    Checked,
    Digest,
    Evidence,
    Leave,
    Order,
    Port,
    Register,
    Report,
)
from orchestrator.contract.messages.events import (
    AgentLost,
    CancelRequested,
    Event,
    LeaveAsked,
    Tick,
    stamped,
)
from orchestrator.job.state import Run, has_successors
from orchestrator.journal.journal import MOST_LINES
from orchestrator.journal.supervisor import Supervisor, is_journalled
from orchestrator.leader.agent_sessions import AgentSessions, Silence
from orchestrator.leader.monitor import Monitor
from orchestrator.simulation.errands import Errands
from orchestrator.simulation.orders import Orders
from orchestrator.simulation.world.network import Line
from orchestrator.simulation.world.storage import Crash, Crashed, StoredJournal

if TYPE_CHECKING:
    from orchestrator.simulation.agents import Agent
    from orchestrator.simulation.world.world import World

LOOK_S = 1.0
CALM_LOOK_S = 4.0
RETRY_S = 1.0
"""Before a write to the journal or the fence is tried again."""
FAREWELL_S = 5.0
FAREWELL_POLL_S = 0.5


class Leader:
    def __init__(self, world: "World", agent: "Agent", journal: StoredJournal) -> None:
        self.world, self.agent, self.host = world, agent, agent.host
        self.name = agent.incarnation
        self.journal = journal
        self.supervisor = Supervisor(journal, world.decide, journal.known)
        job = self.supervisor.run.job
        assert job is not None
        self.job = job
        self.offset = self.host.clock.offset
        """Of its clock, which it reads once."""
        self.connections = AgentSessions(
            job.launch.launch, job.launch.agent_timeout, self.host.clock
        )
        self.agents: dict[str, Agent] = {}
        self.errands = Errands(world, self)
        self.events: deque[Event] = deque()
        self.looking = False
        """What a look finds comes at once."""
        self.busy = False
        """With a write that takes time."""
        self.todo: deque[Action] = deque()
        self.lookout = Monitor(self.job)
        self.orders = Orders(self)
        self.ending: EndJob | Requeue | None = None
        self.alive = self.serves = True
        self.paused_until = 0.0
        self.crash_between: int | None = None
        """How many actions from here it dies."""
        self.looks = 0

    def now(self) -> float:
        """The time that events carry: unix seconds of a clock that never jumps."""
        return self.host.clock.now() - self.host.clock.offset + self.offset

    # What agents say

    def hear(self, line: Line, host: str, report: Report) -> None:
        if not self.alive or not self.serves:
            return
        if isinstance(report, Register):
            self._admit(line, report)
            return
        connection = self.connections.by_host.get(host)
        if connection is None or cast(Any, connection.ws) is not line:
            self._refuse(line, host)  # given up: it has to register again
            return
        connection.heard = self.world.timeline.now
        self._reported(report)

    def _refuse(self, line: Line, host: str) -> None:
        line.open = False
        for agent in self.world.hosts[host].agents:
            agent.lose(line)

    def _admit(self, line: Line, register: Register) -> None:
        event = register.agent
        host = event.host
        if register.launch != self.job.launch.launch:
            self._refuse(line, host)
            return
        found = [a for a in self.world.hosts[host].agents if a.line is line]
        if not found:
            return
        self.agents[host] = found[0]
        silent_s = self.connections.silent_for(host)
        _, is_new = self.connections.admit(register, cast(Any, line))
        if is_new:
            taken = self.errands.taken_before(host, silent_s)
            self._take_in(replace(event, taken=taken))
        if self.ending is not None and _all_leave(self.ending):
            self.order(host, self._goodbye(self.ending))
        self._speak(host)

    def hung_up(self, line: Line) -> None:
        line.open = False
        for connection in self.connections.by_host.values():
            if cast(Any, connection.ws) is line:
                connection.ws = None

    def _reported(self, report: Report) -> None:
        match report:
            case Digest():
                self._heard(report)
            case Port():
                self.orders.port_offered(report)
            case Evidence():
                self.orders.heard[report.event.host] = report
                self._take_in(report.event)
            case Checked():
                self.errands.checked[report.host] = report
            case Register():
                pass
            case _:
                self._take_in(report)

    def _take_in(self, event: Event) -> None:
        self.happened(stamped(event, self.now()))

    def _heard(self, digest: Digest) -> None:
        for event in self.lookout.hear(digest, self.world.timeline.now):
            self._take_in(event)

    def order(self, host: str, order: Order) -> None:
        self.connections.order(host, order)
        self._speak(host)

    def _speak(self, host: str) -> None:
        connection, agent = self.connections.by_host.get(host), self.agents.get(host)
        line = cast("Line | None", connection.ws) if connection else None
        if connection is None or agent is None or line is None:
            return
        while not connection.orders.empty():
            obey = partial(agent.obey, line, connection.orders.get_nowait())
            self.world.network.send(line, self.host.name, obey)

    # Time

    def look(self) -> None:
        if not self.alive:
            return
        now = self.world.timeline.now
        self.looks += 1
        next_look = CALM_LOOK_S if self.world.calm(self) else LOOK_S
        self.world.timeline.after(next_look, partial(self._look_again, self.looks))
        if now < self.paused_until or not self.serves:
            return
        if self.paused_until:
            self.connections.excuse(self.world.pause_s)
            self.paused_until = 0.0
            return
        if self._given_up():
            self.leave("another leader has taken over")
            return
        self.looking = True
        self._pulse(now)
        at = self.now()
        self._lose(self.connections.forget_silent(), at)
        run = self.supervisor.run
        hears_all = partial(self.connections.hears, run.attempt.placement)
        for event in self.lookout.look(hears_all, self.world.timeline.now):
            self._take_in(event)
        self.looking = False
        if self.errands.in_touch:
            self.happened(Tick(at=at))

    def look_now(self) -> None:
        """Look at the moment, and closely from now on."""
        if self.alive:
            self.look()

    def _look_again(self, looks: int) -> None:
        if looks == self.looks:
            self.look()

    def doom(self, number: int, where: Crash | None) -> None:
        """Die `number` lines, or without `where` as many actions, from here."""
        if where is None:
            self.crash_between = number
        else:
            self.journal.crash = (number, where)

    def _given_up(self) -> bool:
        storage = self.world.storage
        readable = storage.serves(self.host.name) and storage.fence is not None
        return readable and storage.fence is not None and storage.fence.leader != self.name

    def _pulse(self, now: float) -> None:
        for host, connection in self.connections.by_host.items():
            agent = self.agents.get(host)
            if agent is None or connection.ws is None:
                continue  # of a leader before, and not here yet
            if cast(Any, connection.ws) is not agent.line:
                continue
            if agent.alive and self.world.passes(self.host.name, host):
                connection.heard = agent.last_heard = now
                agent.unheeded = ""
                if self.lookout.watch is not None and agent.ranks is not None:
                    self._heard(agent.digest())

    def _lose(self, silences: Sequence[Silence], at: float) -> None:
        lost = [AgentLost(at=at, host=s.host, why=s.why, silent_s=s.silent_s) for s in silences]
        others = set(self.connections.by_host) - {self.host.name}
        run = self.supervisor.run
        alone = run.scheduler.allocation is not None and not others
        if lost and (alone or has_successors(run)):
            self.errands.lose(lost, alone=alone)
            return
        for event in lost:
            self.happened(event)

    # Decide and act

    def cancel(self, by: str) -> None:
        self.happened(CancelRequested(at=self.now(), by=by))

    def warned(self, signal_name: str) -> None:
        if self.ending is None:
            self.happened(LeaveAsked(at=self.now(), cause=None, words=signal_name))
            self.errands.ask_why(signal_name)

    def happened(self, event: Event) -> None:
        if self.alive and self.serves:
            self.events.append(event)
            self._consume()

    def _consume(self) -> None:
        while self.events and self._can_decide():
            events = tuple(self.events)[:MOST_LINES]
            ticks = all(isinstance(event, Tick) for event in events)
            slow = 0.0 if ticks else self.world.storage.delay
            if slow:
                self._wait(slow, partial(self._decide, events))
            else:
                self._decide(events)

    def _can_decide(self) -> bool:
        calm = self.errands.in_touch and not (self.busy or self.looking)
        return self.alive and self.serves and calm and self.ending is None

    def _wait(self, seconds: float, then: Any) -> None:
        self.busy = True
        self.world.timeline.after(seconds, partial(self._goes_on, then))

    def _goes_on(self, then: Any) -> None:
        self.busy = False
        if self.alive:
            then()
            self._consume()

    def _decide(self, events: Sequence[Event]) -> None:
        before = self.supervisor.run
        try:
            count, actions = self.supervisor.take(events)
        except Crashed as crashed:
            # Some was decided, though nothing came of it.
            event = self._witnessed(before, events, crashed.lines)
            self.crashes(f"{crashed} of {type(event).__name__}")
            return
        except GivenUp:
            self.leave("another leader has taken over")
            return
        except OSError:
            self._wait(RETRY_S, partial(self._decide, events))
            return
        for _ in range(count):
            self.events.popleft()
        if count > 1:
            self._witnessed(before, events[:count], count)
        else:
            self.world.witness.heard(events[0], before)
            if is_journalled(events[0], before, self.supervisor.run):
                self.world.decided(self, events[0], actions)
        self._remember()
        self.todo.extend(actions)
        self._act()
        for incident in self.supervisor.run.history.incidents[len(before.history.incidents) :]:
            self.world.strike(incident)

    def _remember(self) -> None:
        with contextlib.suppress(GivenUp):  # the next line finds out
            self.journal.remember(self.supervisor.folded)

    def _witnessed(self, run: Run, events: Sequence[Event], lines: int) -> Event:
        """Have the first `lines` of which the journal has a line judged one by one; the event that
        would be the next."""
        for event in events:
            before = run
            run, actions = self.world.decide(before, event)
            told = is_journalled(event, before, run)
            if told and lines == 0:
                return event
            self.world.witness.heard(event, before)
            if not told:
                continue
            lines -= 1
            self.supervisor.run = run
            self.world.decided(self, event, actions)
        return events[-1]

    def _act(self) -> None:
        while self.todo and self.alive and not self.busy:
            if self.crash_between is not None:
                self.crash_between -= 1
                if self.crash_between < 0:
                    self.crashes(f"before {type(self.todo[0]).__name__} was done")
                    return
            action = self.todo[0]
            if isinstance(action, StartAttempt) and not self._raise_fence(action.attempt):
                return
            self.todo.popleft()
            self.orders.perform(action)

    def _raise_fence(self, attempt: int) -> bool:
        """Whether it is on disk; else it is tried again."""
        storage = self.world.storage
        try:
            storage.check_write(self.host.name)
        except OSError:
            self._wait(RETRY_S, self._act)
            return False
        self.world.witness.fence_raised(self)
        if self.world.fenced:
            storage.fence = Fence(leader=self.name, attempt=attempt)
        return True

    # Its end

    def end(self, ending: EndJob | Requeue) -> None:
        """Let every agent go, and wait a while until they have."""
        self.ending = ending
        if isinstance(ending, EndJob):
            self.world.announce(self, over=True)
        if not _all_leave(ending):  # they wait for the next leader
            self._farewell(self.world.timeline.now)
            return
        for host in list(self.connections.by_host):
            self.order(host, self._goodbye(ending))
        self._farewell(self.world.timeline.now + FAREWELL_S)

    def _goodbye(self, ending: EndJob | Requeue) -> Leave:
        again = isinstance(ending, Requeue) and has_successors(self.supervisor.run)
        return Leave(reason=ending.reason, again=again)

    def _farewell(self, deadline: float) -> None:
        if not self.alive:
            return
        if self.connections.open and self.world.timeline.now < deadline:
            self.world.timeline.after(FAREWELL_POLL_S, partial(self._farewell, deadline))
            return
        self.serves = False
        self.agent.leave(exit_codes.REQUEUED if isinstance(self.ending, Requeue) else exit_codes.OK)

    def leave(self, why: str) -> None:
        """Others have taken over: touch nothing."""
        self.world.history.note(self.host.name, f"the leader leaves: {why}")
        self.serves = False
        self.agent.leave(exit_codes.LEADER_LOST)

    def crashes(self, where: str) -> None:
        self.world.history.note(self.host.name, f"the leader is killed {where}")
        self.world.happens("leader")
        self.agent.die()

    def over(self, *, silently: bool) -> None:
        """Its process is gone."""
        self.alive = self.serves = False
        self.world.leader_gone(self, silently=silently)


def _all_leave(ending: EndJob | Requeue) -> bool:
    return isinstance(ending, EndJob) or ending.whole
