"""A follower whose leader is gone, as `failover/leader_lost.py` has it see to the job, or, where
lost hosts have successors, to another agent in the leader's place.

It goes on until it leads itself, or follows another, or the scheduler has taken the job back, or
the job is over, or it is this one that was cut off; where several are left, one after the other.
"""

import contextlib
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from orchestrator.contract.files import exit_codes
from orchestrator.contract.files.leader_file import Term
from orchestrator.errors import BackendError, Unanswered
from orchestrator.failover.after_leader import (
    UNLED,
    AskAgain,
    ClearHost,
    Leave,
    QueueAgain,
    TakeOver,
    after_failed_clearing,
    over_for,
    remedy,
    was_given_back,
)
from orchestrator.failover.ask_scheduler import RETRY_S
from orchestrator.failover.journal_watch import (
    STRANGER_S,
    Seen,
    in_doubt,
    is_stranger,
    lives,
    patience_s,
    runs_without_leader,
    seen_by,
)
from orchestrator.failover.leader_lost import SEE_S
from orchestrator.failover.turns import TURN_S
from orchestrator.job.state import Run
from orchestrator.seams import CurrentRun

if TYPE_CHECKING:
    from orchestrator.simulation.agents import Agent
    from orchestrator.simulation.world.scheduler import Scheduler
    from orchestrator.simulation.world.world import World

CLEAR_S = 2.0
"""For a step that ends what is left on the former leader's host."""


class Leaderless:
    def __init__(
        self, world: "World", agent: "Agent", scheduler: "Scheduler", done: Callable[[], None]
    ) -> None:
        self.world, self.agent, self.scheduler, self.done = world, agent, scheduler, done
        self.term = Term(agent.launch, agent.restarts)
        self.looked = self.begun = world.timeline.now
        self.before: Seen | None = None
        """As the journal was when it was first read."""
        self.uncleared_since: float | None = None
        fence = world.storage.fence
        self.former = None if fence is None else fence.leader

    def ask(self) -> None:
        if not self.agent.alive or not self.agent.is_alone:
            self._over()
        elif not self.world.storage.serves(self.agent.host.name):
            self._again()  # what it wants to read blocks
        elif self.before is None:
            self._look()
        else:
            self._look_again(self.before, self._seen())

    def _look(self) -> None:
        self.before = self._seen()
        self.looked = self.world.timeline.now
        given_back = was_given_back(self.before.run, self.term)
        waits_s = 0.0 if given_back else patience_s(self.before)
        if waits_s is None:
            self._lives()
        else:
            self.begun = self.looked + waits_s
            self.world.timeline.after(waits_s, self.ask)

    def _look_again(self, before: Seen, seen: Seen) -> None:
        waited_s, fence = self.world.timeline.now - self.looked, self.world.storage.fence
        stranger = is_stranger(seen, self.term, self.agent.host.name)
        if over_for(seen.run, self.term):
            self._leave()
        elif fence is not None and fence.leader != self.former:
            self._over()  # another takes over
        elif lives(before, seen) or (stranger and waited_s >= STRANGER_S):
            self._lives()
        elif stranger or in_doubt(before, seen, waited_s) or not self._in_turn():
            self._again()
        elif runs_without_leader(seen.run, self.term) >= UNLED:
            self._leave()
        else:
            self._act(seen.run)

    def _seen(self) -> Seen:
        entries = self.world.storage.recall()
        last = entries[-1].event if entries else None
        led = not self.world.lock_is_free
        return seen_by(self.agent.host.name, self.world.run, len(entries), last, led=led)

    def _in_turn(self) -> bool:
        """The lock is let go of by its holder's death; not by that of its host, for a while."""
        storage, now = self.world.storage, self.world.timeline.now
        if storage.asks is None or storage.asks is self or now - self.begun >= TURN_S:
            storage.asks = self
            return True
        return False

    # Its turn

    def _act(self, run: Run) -> None:
        try:
            own = self.scheduler.own_run(self.agent.host.name, self.agent)
        except Unanswered:
            self._again()
            return
        host, now = self.agent.host.name, self.agent.host.clock.now()
        found = remedy(run, self.term, host, own, now)
        if isinstance(found, ClearHost | TakeOver):
            self.world.witness.takes_over(self.agent, run)
        if isinstance(found, ClearHost):
            self.world.timeline.after(CLEAR_S, partial(self._clear, run, own, found.host))
        else:
            self._do(run, found)

    def _clear(self, run: Run, own: CurrentRun, host: str) -> None:
        if not self.agent.alive:
            self._over()
            return
        found: TakeOver | QueueAgain | AskAgain
        try:
            found = TakeOver(self.scheduler.clear_host(self.agent.host.name, self.agent, host))
        except BackendError as exc:
            now = self.world.timeline.now
            self.uncleared_since = now if self.uncleared_since is None else self.uncleared_since
            tried_s = now - self.uncleared_since
            found = after_failed_clearing(run, own, exc.message, tried_s)
        self._do(run, found)

    def _do(self, run: Run, found: Leave | QueueAgain | TakeOver | AskAgain) -> None:
        match found:
            case Leave():
                self._leave()
            case AskAgain():
                self._again()
            case QueueAgain(without, _):
                self.scheduler.requeue(self.agent.host.name, self.agent, without, self._answered)
            case TakeOver(how):
                self.world.claims(self.agent, how, self._claimed)

    def _claimed(self, leads: bool) -> None:
        """Where the journal stays locked, the job is queued again without the former leader's
        host."""
        if leads or not self.agent.alive:
            self._over()
            return
        self._do(self.world.run, QueueAgain((self.world.run.scheduler.leader,), ""))

    def _answered(self, taken: bool) -> None:
        if taken:
            self._leave()
        else:
            self._again()

    def _again(self) -> None:
        self.world.timeline.after(RETRY_S, self.ask)

    # It is settled

    def _lives(self) -> None:
        self.world.witness.taken_for_alive(self.agent.host)
        self._leave()

    def _leave(self) -> None:
        self._over()
        self.agent.leave(exit_codes.LEADER_LOST)

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
