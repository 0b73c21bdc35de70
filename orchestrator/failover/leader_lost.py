"""What agents do when their leader is gone.

If the job keeps its hosts for as long as it runs (Slurm, one machine), the agents act one after the
other: one of them becomes the leader or has the job requeued, and the others follow the new leader
(`takeover.py`). If the scheduler replaces lost hosts (Kubernetes), agents ask it for a new leader.
"""

import asyncio
import logging
import math
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Literal, TypeVar

from msgspec import Struct

from orchestrator.contract.files.fence import Fence
from orchestrator.contract.files.leader_file import Term
from orchestrator.errors import BackendError, InUse, JobError
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
from orchestrator.failover.ask_scheduler import RETRY_S, Asking
from orchestrator.failover.journal_watch import (
    GIVEN_UP_S,
    LOOK_S,
    STRANGER_S,
    UNREADABLE,
    Seen,
    is_stranger,
    lives,
    patience_s,
    runs_without_leader,
    writes,
)
from orchestrator.failover.storage import AnyTurn, FailoverStorage, Follows
from orchestrator.job.state import Run, hosts_given
from orchestrator.journal.supervisor import OpenJournal
from orchestrator.posix.retry_io import LASTING, TAKE_OVER_S, retry_io_in
from orchestrator.seams import AllocationBackend, Clock, CurrentRun, Worker

if TYPE_CHECKING:
    from orchestrator.agent.agent import Agent

log = logging.getLogger(__name__)

NEVER_HEARD = (
    "%s was never heard by the leader on %s, which is alive, so the job is not queued again: check"
    " the network between the two hosts"
)

T = TypeVar("T")

ONE_MACHINE = CurrentRun(phase="running", words="without a scheduler", hosts=())
"""A job without a scheduler keeps its hosts until its last process exits."""
SEE_S = 30.0
"""Longer than a leader needs to restart on a live host. Also how long each host waits for the host
before it to act."""


class Claim(Struct, frozen=True):
    """What an agent holds when it becomes the leader."""

    name: str
    """The new leader's name in the fence."""
    journal: OpenJournal
    turn: AnyTurn
    """Close it when the other agents can find the new leader. Until then no other agent acts."""
    lost: TakeOver
    """What is known of the former leader's end."""


Outcome = Claim | Literal["leave", "follow"]
"""`follow`: a leader is heard again, or another agent becomes the leader."""


@dataclass(slots=True)
class Leaderless:
    """One agent without a leader, until it is decided what the agent does."""

    storage: FailoverStorage
    term: Term
    host: str
    backend_named: Callable[[str], AllocationBackend]
    clock: Clock
    is_alone: Callable[[], bool] = lambda: True
    """Whether the agent still hears no leader."""
    heard: bool = True
    """The agent has heard the leader that is gone."""
    worker: Worker = asyncio.to_thread
    pause: Callable[[float], Awaitable[None]] = asyncio.sleep
    """Waits between two checks."""
    asking: Asking = field(init=False)
    former: Fence | None = field(init=False, default=None)
    """The fence at the beginning. Only an agent that becomes the leader changes its name."""
    uncleared_since: float | None = field(init=False, default=None)
    """When clearing the former leader's host first failed (monotonic)."""
    unwritable_at: float | None = field(init=False, default=None)
    """When this host last failed to write to the run directory (monotonic)."""
    wrote_at: float | None = field(init=False, default=None)
    """When a line was seen that the former leader wrote after it was lost (monotonic)."""

    def __post_init__(self) -> None:
        self.asking = Asking(self.backend_named, self.clock, self.worker)

    async def settle(self) -> Outcome:
        """Decide what this agent does, and requeue the job if that is needed.

        Without this the allocation would be idle to its end. Every remaining agent calls it, and
        they act one after the other.
        """
        try:
            return await self._settle()
        # Waiting does not repair these errors. `_served` retries every other OSError.
        except LASTING as exc:
            log.error("leaving: the run directory is gone or not accessible: %s", exc)
        except JobError as exc:
            log.error("leaving: the journal is damaged, so no agent can lead: %s", exc)
        return "leave"

    async def _served(self, work: Callable[[], T], what: str) -> T:
        return await retry_io_in(self.worker, work, what, self.pause)

    async def _settle(self) -> Outcome:
        # Read first: a fence that changes from now on shows that another agent takes over.
        self.former = await self._served(self.storage.read_fence, "failed to read the fence")
        mark = f"{self.term}, {self.former}: settled\n"
        opened = partial(self.storage.open_turn, mark)
        turn = await self._served(opened, "failed to open the lock for turns")
        outcome: Outcome = "leave"
        try:
            outcome = await self._in_turn(turn)
            return outcome
        finally:
            if not isinstance(outcome, Claim):  # a new leader keeps the turn until it is found
                turn.close()

    async def _in_turn(self, turn: AnyTurn) -> Outcome:
        size = await self._served(self.storage.journal_size, UNREADABLE)
        waiting = partial(self._may_wait, turn, size)
        while not await self.worker(turn.has_come) and await self._served(waiting, UNREADABLE):
            # A leader was heard while this agent waited for its turn.
            if not self.is_alone():
                return "follow"
            await self.pause(RETRY_S)
        # A thousand agents need not ask the scheduler what the first one has found out.
        if await self._served(turn.is_settled, UNREADABLE):
            log.info("leaving: another agent has found that nothing is left to do")
            return "leave"
        following = self.storage.follow(self.host)
        before = await self._served(following.look, UNREADABLE)
        looked, waits_s = self.clock.monotonic(), patience_s(before, heard=self.heard)
        if was_given_back(before.run, self.term):
            waits_s = 0.0  # the leader decided to requeue the job, so it writes nothing more
        if waits_s is None:
            log.info("leaving: the leader is alive and has given up %s", self.host)
            return "leave"
        # A live leader needs this time to write a line, which shows that it is alive.
        if waits_s:
            await self.pause(waits_s)
        look = partial(self._look, following)
        while self.is_alone():
            seen, now = await self._served(look, UNREADABLE)
            waited_s = self.clock.monotonic() - looked
            outcome = await self._known(before, seen, now, waited_s, turn)
            doubts = is_stranger(seen, self.term, self.host) or self._in_doubt(before, seen)
            # While the leader may be alive, or it is another agent's turn, only watch the journal.
            if outcome is None and not doubts and await self.worker(turn.has_come):
                still_gone = partial(self._is_still_gone, before, look, looked)
                outcome = await self._act(seen.run, turn, still_gone)
            if outcome is not None:
                return outcome
            await self.pause(RETRY_S)
        return "follow"

    def _may_wait(self, turn: AnyTurn, size: int) -> bool:
        """Whether this host can wait for its turn without reading the journal.

        If the journal does not grow, no leader is alive, so it is not this host alone that lost it.
        Then the agents act in turns, and thousands of hosts need not read a long journal at once.
        """
        return (
            self.storage.read_fence() == self.former
            and self.storage.journal_size() == size
            and not turn.is_settled()
        )

    def _in_doubt(self, before: Seen, seen: Seen) -> bool:
        """Whether the leader may still give up this host. A leader that was suspended begins to
        write late, so the time counts from its first line."""
        if not writes(before, seen):
            return False
        if self.wrote_at is None:
            self.wrote_at = self.clock.monotonic()
        return not seen.given_up and self.clock.monotonic() - self.wrote_at < GIVEN_UP_S

    async def _could_write(self, for_s: float) -> bool:
        """Whether a leader could have written a line in the last `for_s` seconds: one that finds
        the disk full, or the storage slow, is silent in the journal too."""
        began = self.clock.monotonic()
        try:
            await self.worker(self.storage.check_writable)
        except LASTING:
            raise
        except OSError as exc:
            log.warning("the run directory cannot be written, so no leader can be judged: %s", exc)
            self.unwritable_at = self.clock.monotonic()
        now, since = self.clock.monotonic(), self.unwritable_at
        if since is not None and now - since < LOOK_S:
            return False
        # The leader may have had a line to finish before it could write another one.
        return for_s >= 2 * (now - began)

    async def _is_still_gone(
        self, before: Seen, look: Callable[[], tuple[Seen, Fence | None]], looked: float
    ) -> bool:
        """The scheduler may answer late, and a leader that was suspended may be back by then."""
        # Without a process that leads, no line is expected.
        silent_s = self.clock.monotonic() - looked if before.led else math.inf
        if not await self._could_write(silent_s):
            return False
        seen, _ = await self._served(look, UNREADABLE)
        return self.is_alone() and not lives(before, seen) and not self._in_doubt(before, seen)

    def _look(self, following: Follows) -> tuple[Seen, Fence | None]:
        return following.look(), self.storage.read_fence()

    async def _known(
        self, before: Seen, seen: Seen, now: Fence | None, waited_s: float, turn: AnyTurn
    ) -> Outcome | None:
        """The outcome that follows from journal and fence alone; None if this agent must act."""
        run = seen.run
        if why := over_for(run, self.term):
            log.info("leaving: %s", why)
            await self.worker(turn.settle)
            return "leave"
        # Another agent has had its turn. Taking the fence from it would end a leader that works.
        if now is not None and now.leader != (self.former.leader if self.former else None):
            log.info("another agent takes over: waiting for it")
            return "follow"
        # This and the next case concern this host alone, so they do not settle the turn for the
        # other agents.
        if lives(before, seen):
            log.info("leaving: %s was cut off from the leader, which is alive", self.host)
            return "leave"
        if is_stranger(seen, self.term, self.host) and waited_s >= STRANGER_S:
            log.error(NEVER_HEARD, self.host, run.scheduler.leader)
            return "leave"
        if (unled := runs_without_leader(run, self.term)) >= UNLED:
            log.error(
                "no leader has started in %s allocations in a row, so the job is not queued again:"
                " read its agents' logs, then resume with `ndctl submit SPEC --resume`",
                unled,
            )
            await self.worker(turn.settle)
            return "leave"
        return None

    async def _act(
        self, run: Run, turn: AnyTurn, still_gone: Callable[[], Awaitable[bool]]
    ) -> Outcome | None:
        """Take over, requeue the job, or leave. None: try again."""
        assert run.job is not None
        launch, backend = run.job.launch, self.backend_named(run.job.backend)
        granted, fixed_hosts = backend.granted, backend.fixed_hosts
        assert fixed_hosts is not None, "elsewhere the cluster replaces a lost leader"
        own = ONE_MACHINE
        try:
            if granted is not None:
                own = await self.worker(granted.own_run, launch, hosts_given(run))
        # Without the answer it is not known whether the allocation lasts, so nothing is taken over.
        except BackendError as exc:
            return "leave" if self.asking.is_hopeless(launch.job, exc) else None
        found: Leave | QueueAgain | ClearHost | TakeOver | AskAgain | None
        found = remedy(run, self.term, self.host, own, self.clock.now())
        if isinstance(found, ClearHost):
            clear = partial(fixed_hosts.clear_host, launch, found.host)
            found = await self._clear_host(clear, run, own, still_gone)
        match found:
            case None:
                return None
            # The scheduler ends or has requeued this run, so no other agent has to ask it again.
            case Leave(why):
                log.info("leaving: %s", why)
                await self.worker(turn.settle)
                return "leave"
            case AskAgain(why):
                log.error("the leader on %s is gone, trying again: %s", run.scheduler.leader, why)
                return None
            case QueueAgain(without, why):
                return "leave" if await self.asking.settles(run, without, why) else None
            case TakeOver() as lost:
                return await self._claim(run, turn, lost)

    async def _clear_host(
        self,
        clear: Callable[[], str],
        run: Run,
        own: CurrentRun,
        still_gone: Callable[[], Awaitable[bool]],
    ) -> TakeOver | QueueAgain | AskAgain | None:
        """End the former leader's process, which may hang or be unreachable, through the scheduler.
        This also shows whether its host works. None: the leader may be alive."""
        if not await still_gone():
            return None
        try:
            return TakeOver(await self.worker(clear), host_works=True)
        except BackendError as exc:
            # The scheduler may have tried for long, and the leader may be back.
            if not await still_gone():
                return None
            return after_failed_clearing(run, own, exc.message, self._tried_s())

    def _tried_s(self) -> float:
        """Seconds since clearing the former leader's host first failed."""
        now = self.clock.monotonic()
        if self.uncleared_since is None:
            self.uncleared_since = now
        return now - self.uncleared_since

    async def _claim(self, run: Run, turn: AnyTurn, lost: TakeOver) -> Outcome | None:
        """Become the leader. None: try again."""
        # First the fence, which ends a former leader that is still alive. Then the journal: the
        # kernel or the file server releases the former leader's lock on it.
        log.warning(
            "the leader on %s is gone (%s): this agent takes over", run.scheduler.leader, lost.how
        )
        name = secrets.token_hex(8)
        taking = partial(self.storage.take_over, name)
        await self._served(taking, "failed to take the fence")
        self.former = Fence(leader=name, attempt=self.former.attempt if self.former else 0)
        try:
            opening = partial(self.storage.open_journal, name, TAKE_OVER_S)
            journal = await self._served(opening, "the journal cannot be opened")
        except InUse as exc:
            # A stopped process of the former leader can hold the lock for ever. Only an allocation
            # without its host gets rid of it.
            why = f"a process of the former leader holds the journal: {exc.message}"
            return "leave" if await self.asking.settles(run, (run.scheduler.leader,), why) else None
        return Claim(name=name, journal=journal, turn=turn, lost=lost)


async def see_to_the_leader(
    agent: "Agent",
    turn: int,
    backend_named: Callable[[str], AllocationBackend],
    storage: FailoverStorage,
    worker: Worker = asyncio.to_thread,
) -> None:
    """While no leader is heard, ask the scheduler now and then for a new one.

    A scheduler replaces a lost leader by itself, unless the leader's host is unreachable or cannot
    start an agent. Hosts ask in turns, and later ones wait longer and ask less often. So a thousand
    hosts make only a few requests.
    """
    timeout = agent.config.agent_timeout
    following = storage.follow(agent.config.place.host)
    lines: int | None = None
    while True:
        await asyncio.sleep(SEE_S / 3)
        if agent.silent_for() < timeout + SEE_S * (turn - 1):
            lines = None  # the leader was heard: an old count of lines means nothing any more
            continue
        # Storage that fails for a moment must not end this watch: no other pod may be left.
        seen = await retry_io_in(worker, following.look, UNREADABLE, asyncio.sleep)
        writes, lines, run = lines is None or seen.lines > lines, seen.lines, seen.run
        # A leader that writes to the journal is alive, and only this host is cut off from it.
        if writes or agent.silent_for() < timeout + SEE_S * turn:
            continue
        # There is no job yet, or it is over: it needs no leader.
        if run.job is None or run.ending is not None:
            continue
        successors = backend_named(run.job.backend).successors
        assert successors is not None, "only agents of pods wait for another leader"
        revive = partial(successors.revive_leader, run.job.launch, silent_s=agent.silent_for())
        try:
            await worker(revive)
        except BackendError as exc:
            log.error("failed to ask for a new leader, trying again: %s", exc)
        await asyncio.sleep(SEE_S * turn)
