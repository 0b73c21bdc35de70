"""A real leader in the simulated world.

The laws check each of its decisions. A fault can kill it at any line of its journal and between any
two actions.
"""

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from orchestrator.contract.messages.actions import Action, StopAttempt
from orchestrator.contract.messages.events import Event
from orchestrator.job.state import Run
from orchestrator.journal.supervisor import Supervisor, is_journalled
from orchestrator.leader.leader import Leader
from orchestrator.leader.monitor import Monitor
from orchestrator.simulation.world.storage import SNAPSHOT_LINES, Crash, Crashed, StoredJournal

if TYPE_CHECKING:
    from orchestrator.simulation.processes.agent_process import AgentProcess


class LeaderProcess:
    def __init__(self, process: "AgentProcess", journal: StoredJournal) -> None:
        self.process, self.agent, self.world = process, process, process.world
        self.host, self.name = process.host, process.incarnation
        self.fence_name = process.fence_name
        self.alive = True
        self.leader: Leader | None = None
        """None until the scheduler has granted the hosts."""
        self.journal = journal
        self.supervisor = CheckedSupervisor(self)
        self.crash_before_action: int | None = None
        """The leader dies after this number of further actions; None: it does not."""

    def begin(self, leader: Leader) -> None:
        self.leader = leader
        leader.snapshots.every = SNAPSHOT_LINES
        leader.events.perform = partial(self._perform, leader.events.perform)
        if self.world.crash_next is not None:
            self.crash_after(*self.world.crash_next)
            self.world.crash_next = None

    @property
    def is_serving(self) -> bool:
        return self.process.server is not None

    @property
    def is_paused(self) -> bool:
        loop = self.process.loop
        return loop.time() < loop.paused_until

    @property
    def monitor(self) -> Monitor | None:
        return None if self.leader is None else self.leader.monitor

    async def _perform(self, perform: Any, action: Action) -> None:
        if self.crash_before_action is not None:
            self.crash_before_action -= 1
            if self.crash_before_action < 0:
                self.crash_now(f"before {type(action).__name__}")
                await self.process.loop.create_future()
        leaves = self.supervisor.run.interruption.leaving is not None
        if leaves and isinstance(action, StopAttempt) and not action.hosts:
            self.world.stop_begins()
        await perform(action)

    # Called by the world

    def cancel(self, by: str) -> None:
        assert self.leader is not None
        self.process.loop.call_soon(self.leader.cancel, by)

    def ask_notices(self) -> None:
        """Ask the scheduler for notices about the hosts now."""
        assert self.leader is not None
        self.process.loop.create_task(self.leader.backend_calls.ask_notices())

    def pause(self, seconds: float) -> None:
        """Stop the process, which includes the agent."""
        self.process.loop.pause(seconds)

    def crash_after(self, number: int, where: Crash | None) -> None:
        """Die after `number` further lines of the journal; without `where`, after `number`
        actions."""
        if where is None:
            self.crash_before_action = number
        else:
            self.journal.crash = (number, where)

    def crash_now(self, where: str) -> None:
        self.world.history.note(self.host.name, f"the leader is killed {where}")
        self.world.took_effect("leader")
        self.process.die()

    def ended(self, *, silently: bool) -> None:
        self.alive = False
        self.world.laws.leader_ended(self)


class CheckedSupervisor(Supervisor):
    """The real supervisor. The laws check each decision, and writes take virtual time."""

    def __init__(self, leader: LeaderProcess) -> None:
        self.leader = leader
        super().__init__(leader.journal, leader.world.decide, leader.journal.known)

    def take(self, events: Sequence[Event]) -> Any:
        """A coroutine, which the worker awaits."""
        return self._take(events)

    async def _take(self, events: Sequence[Event]) -> tuple[int, tuple[Action, ...]]:
        world, before = self.leader.world, self.run
        if world.storage.delay and any(type(event).__name__ != "Tick" for event in events):
            await asyncio.sleep(world.storage.delay)
        try:
            count, actions = super().take(events)
        except Crashed as crashed:
            event = self._check(before, events, crashed.lines)
            self.leader.crash_now(f"{crashed} of {type(event).__name__}")
            return 0, ()
        if count > 1:
            self._check(before, events[:count], count)
        else:
            world.laws.before_decision(events[0], before)
            if is_journalled(events[0], before, self.run):
                world.decided(self.leader, events[0], actions)
        return count, actions

    def _check(self, run: Run, events: Sequence[Event], lines: int) -> Event:
        """Check the decisions of the first `lines` journalled events one by one. Returns the next
        event, or the last one."""
        world = self.leader.world
        for event in events:
            before = run
            run, actions = self.decide(before, event)
            journalled = is_journalled(event, before, run)
            if journalled and lines == 0:
                return event
            world.laws.before_decision(event, before)
            if not journalled:
                continue
            lines -= 1
            self.run = run
            world.decided(self.leader, event, actions)
        return events[-1]
