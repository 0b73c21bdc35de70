"""A follower whose leader is gone, as `agent/leaderless.py` has it ask for the job's requeue, or,
where lost hosts have successors, for another agent in the leader's place.

The first asks until the scheduler has taken the job back, or the job is over or led by another, or
it is this one that was cut off; where several are left, one after the other.
"""

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from orchestrator.agent.leaderless import (
    RETRY_S,
    SEE_S,
    STRANGER_S,
    TURN_S,
    UNLED,
    Seen,
    in_doubt,
    is_stranger,
    lives,
    patience_s,
    runs_without_leader,
    seen_by,
    to_leave_out,
)
from orchestrator.agent.whereabouts import Term
from orchestrator.errors import BackendError, Unanswered

if TYPE_CHECKING:
    from orchestrator.simulation.agents import Agent
    from orchestrator.simulation.world import World


class Leaderless:
    def __init__(self, world: "World", agent: "Agent", done: Callable[[], None]) -> None:
        self.world, self.agent, self.done = world, agent, done
        self.looked = self.begun = world.timeline.now
        self.before: Seen | None = None
        """As the journal was when it was first read."""
        fence = world.storage.fence
        self.former = None if fence is None else fence.leader

    def ask(self) -> None:
        if not self.agent.alive:
            self._over()
            return
        if not self.world.storage.serves(self.agent.host.name):
            self._again()  # what it wants to read blocks
        elif self.before is None:
            self._look()
        elif lives(self.before, self._seen()):
            self._lives()
        elif not self._still_ours():
            self._over()
        elif self._is_stranger() and self.world.timeline.now - self.looked >= STRANGER_S:
            self._lives()
        elif self._is_stranger() or self._in_doubt() or not self._in_turn():
            self._again()
        else:
            self._ask_scheduler()

    def _look(self) -> None:
        self.before = self._seen()
        self.looked = self.world.timeline.now
        waits_s = patience_s(self.before)
        if waits_s is None:
            self._lives()
        else:
            self.begun = self.looked + waits_s
            self.world.timeline.after(waits_s, self.ask)

    def _seen(self) -> Seen:
        entries = self.world.storage.recall()
        last = entries[-1].event if entries else None
        led = not self.world.lock_is_free
        return seen_by(self.agent.host.name, self.world.run, len(entries), last, led=led)

    def _still_ours(self) -> bool:
        run, fence = self.world.run, self.world.storage.fence
        led = fence is not None and fence.leader != self.former
        return run.ending is None and self.world.job.launch == self.agent.launch and not led

    def _is_stranger(self) -> bool:
        term = Term(self.agent.launch, self.agent.restarts)
        return is_stranger(self._seen(), term, self.agent.host.name)

    def _in_doubt(self) -> bool:
        assert self.before is not None
        return in_doubt(self.before, self._seen(), self.world.timeline.now - self.looked)

    def _lives(self) -> None:
        self.world.witness.taken_for_alive(self.agent.host)
        self._over()

    def _in_turn(self) -> bool:
        """The lock is let go of by its holder's death; not by that of its host, for a while."""
        storage, now = self.world.storage, self.world.timeline.now
        if storage.asks is None or storage.asks is self or now - self.begun >= TURN_S:
            storage.asks = self
            return True
        return False

    def _ask_scheduler(self) -> None:
        scheduler, host = self.world.scheduler, self.agent.host.name
        try:
            if scheduler.has_ended(host):
                self._over()
                return
        except Unanswered:
            self._again()
            return
        run, term = self.world.run, Term(self.agent.launch, self.agent.restarts)
        if runs_without_leader(run, term) >= UNLED:
            self._over()
            return
        granted = scheduler.allocation(self.agent)
        without = to_leave_out(run, term, host, granted.hosts if granted else ())
        scheduler.requeue(host, self.agent, without, self._answered)

    def _answered(self, taken: bool) -> None:
        if taken:
            self._over()
        else:
            self._again()

    def _again(self) -> None:
        self.world.timeline.after(RETRY_S, self.ask)

    def _over(self) -> None:
        if self.world.storage.asks is self and self.agent.host.up:
            self.world.storage.asks = None
        self.done()


class SeeingToTheLeader:
    """As `see_to_the_leader`: hosts take turns."""

    def __init__(self, world: "World", agent: "Agent", turn: int) -> None:
        self.world, self.agent, self.turn = world, agent, turn
        self.lines: int | None = None

    def wait(self, more_s: float = 0.0) -> None:
        self.world.timeline.after(SEE_S / 3 + more_s, self._see)

    def _see(self) -> None:
        agent, world = self.agent, self.world
        if not agent.alive or agent.leaving:
            return
        silent_s, timeout = world.timeline.now - agent.last_heard, world.job.agent_timeout
        if silent_s < timeout + SEE_S * (self.turn - 1):
            self.lines = None
            self.wait()
            return
        if not world.storage.serves(agent.host.name):
            self.wait()  # what it wants to read blocks
            return
        lines = len(world.storage.recall())
        writes, self.lines = self.lines is None or lines > self.lines, lines
        if writes or silent_s < timeout + SEE_S * self.turn or not self._replaces(silent_s):
            self.wait()
        else:
            self.wait(SEE_S * self.turn)

    def _replaces(self, silent_s: float) -> bool:
        if self.world.run.ending is not None:
            return False
        with contextlib.suppress(BackendError):
            self.world.revive_leader(self.agent, silent_s)
        return True
