"""What agents do whose leader is gone.

Where a job has its hosts for as long as it runs, one of them takes over, in its turn, or has the
scheduler queue the job again; the others follow the new leader (`takeover.py`). Where the
scheduler replaces hosts that are lost, they see to it that it does.
"""

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Literal, TypeVar

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
    STRANGER_S,
    UNREADABLE,
    Seen,
    in_doubt,
    is_stranger,
    lives,
    patience_s,
    runs_without_leader,
)
from orchestrator.failover.storage import AnyTurn, FailoverStorage, Follows
from orchestrator.job.state import Run, hosts_given
from orchestrator.journal.supervisor import OpenJournal
from orchestrator.posix.retry_io import LASTING, TAKE_OVER_S, retry_io_in
from orchestrator.seams import AllocationBackend, Clock, Worker

if TYPE_CHECKING:
    from orchestrator.agent.agent import Agent

log = logging.getLogger(__name__)

NEVER_HEARD = (
    "%s was never heard by the leader on %s, which lives: the job is not queued again; look at the"
    " network between the two"
)

T = TypeVar("T")

SEE_S = 30.0
"""Longer than a leader whose host lives takes to come back; and how long each host waits for the
one before it to have done something about it."""


@dataclass(frozen=True, slots=True)
class Claim:
    """What an agent has that leads from now on."""

    name: str
    """By which the fence knows it."""
    journal: OpenJournal
    turn: AnyTurn
    """Closed once the other agents can find the new leader: until then nobody else claims."""
    how: str
    """The former leader ended, as far as is known."""


Outcome = Claim | Literal["leave", "follow"]
"""`follow`: a leader is heard again, or another agent takes over."""


@dataclass(slots=True)
class Leaderless:
    """One agent that hears no leader, until that is settled."""

    storage: FailoverStorage
    term: Term
    host: str
    backend_named: Callable[[str], AllocationBackend]
    clock: Clock
    is_alone: Callable[[], bool] = lambda: True
    """Whether no leader is heard still."""
    worker: Worker = asyncio.to_thread
    pause: Callable[[float], Awaitable[None]] = asyncio.sleep
    """How it waits between two looks."""
    asking: Asking = field(init=False)
    former: Fence | None = field(init=False, default=None)
    """As it was at first: who changes it leads."""
    uncleared_since: float | None = field(init=False, default=None)
    """When it was first tried in vain to clear the former leader's host."""

    def __post_init__(self) -> None:
        self.asking = Asking(self.backend_named, self.clock, self.worker)

    async def settle(self) -> Outcome:
        """Go on until it is known what becomes of the job.

        Nobody else would see to it: the allocation would stand idle to its end. Every agent that
        is left comes here, and they act one after the other.
        """
        try:
            return await self._settle()
        except LASTING as exc:
            log.error("leaving: the run directory is gone, or closed to this agent: %s", exc)
        except JobError as exc:
            log.error("leaving: nobody can go on from this journal: %s", exc)
        return "leave"

    async def _served(self, work: Callable[[], T], what: str) -> T:
        return await retry_io_in(self.worker, work, what, self.pause)

    async def _settle(self) -> Outcome:
        self.former = await self._served(self.storage.read_fence, "the fence cannot be read")
        mark = f"{self.term}, {self.former}: settled\n"
        opened = partial(self.storage.open_turn, mark)
        turn = await self._served(opened, "agents cannot take turns")
        outcome: Outcome = "leave"
        try:
            outcome = await self._in_turn(turn)
            return outcome
        finally:
            if not isinstance(outcome, Claim):
                turn.close()

    async def _in_turn(self, turn: AnyTurn) -> Outcome:
        size = await self.worker(self.storage.journal_size)
        waiting = partial(self._may_wait, turn, size)
        while not await self.worker(turn.has_come) and await self._served(waiting, UNREADABLE):
            if not self.is_alone():
                return "follow"
            await self.pause(RETRY_S)
        if await self.worker(turn.is_settled):
            log.info("another agent has seen that the job is not to be queued again")
            return "leave"
        following = self.storage.follow(self.host)
        before = await self._served(following.look, UNREADABLE)
        looked, waits_s = self.clock.monotonic(), patience_s(before)
        if was_given_back(before.run, self.term):
            waits_s = 0.0  # its leader is done with it
        if waits_s is None:
            log.info("leaving: the leader lives, and has given %s up", self.host)
            return "leave"
        if waits_s:
            await self.pause(waits_s)
        look = partial(self._look, following)
        while self.is_alone():
            seen, now = await self._served(look, UNREADABLE)
            waited_s = self.clock.monotonic() - looked
            outcome = await self._known(before, seen, now, waited_s, turn)
            doubts = is_stranger(seen, self.term, self.host) or in_doubt(before, seen, waited_s)
            if outcome is None and not doubts and await self.worker(turn.has_come):
                outcome = await self._act(seen.run, turn)
            if outcome is not None:
                return outcome
            await self.pause(RETRY_S)
        return "follow"

    def _may_wait(self, turn: AnyTurn, size: int) -> bool:
        """Whether this host need not look at the journal yet: nobody writes to it, so no leader
        lives that may have given this host alone up. Then all hosts are without one, and the
        journal of weeks is not for thousands to read at the same time."""
        return (
            self.storage.read_fence() == self.former
            and self.storage.journal_size() == size
            and not turn.is_settled()
        )

    def _look(self, following: Follows) -> tuple[Seen, Fence | None]:
        return following.look(), self.storage.read_fence()

    async def _known(
        self, before: Seen, seen: Seen, now: Fence | None, waited_s: float, turn: AnyTurn
    ) -> Outcome | None:
        """What follows from journal and fence alone; None: it is for this agent to act."""
        run = seen.run
        if why := over_for(run, self.term):
            log.info("leaving: %s", why)
            await self.worker(turn.settle)
            return "leave"
        if now is not None and now.leader != (self.former.leader if self.former else None):
            log.info("another agent takes over: waiting for it")
            return "follow"
        if lives(before, seen):
            log.info("leaving: %s was cut off from a leader that lives", self.host)
            return "leave"
        if is_stranger(seen, self.term, self.host) and waited_s >= STRANGER_S:
            log.error(NEVER_HEARD, self.host, run.scheduler.leader)
            return "leave"
        if (unled := runs_without_leader(run, self.term)) >= UNLED:
            log.error(
                "no leader has begun in %s allocations in a row: the job is not queued again; the"
                " logs of its agents say why; then resume with `ndctl submit SPEC --resume`",
                unled,
            )
            await self.worker(turn.settle)
            return "leave"
        return None

    async def _act(self, run: Run, turn: AnyTurn) -> Outcome | None:
        """Do what is to be done; None: it has to be tried again."""
        assert run.job is not None
        launch, backend = run.job.launch, self.backend_named(run.job.backend)
        granted, fixed_hosts = backend.granted, backend.fixed_hosts
        assert granted is not None
        assert fixed_hosts is not None, "elsewhere the cluster replaces a lost leader"
        try:
            own = await self.worker(granted.own_run, launch, hosts_given(run))
        except BackendError as exc:
            return "leave" if self.asking.is_hopeless(launch.job, exc) else None
        found: Leave | QueueAgain | ClearHost | TakeOver | AskAgain
        found = remedy(run, self.term, self.host, own, self.clock.now())
        if isinstance(found, ClearHost):
            try:
                found = TakeOver(await self.worker(fixed_hosts.clear_host, launch, found.host))
            except BackendError as exc:
                found = after_failed_clearing(run, own, exc.message, self._tried_s())
        match found:
            case Leave(why):
                log.info("leaving: %s", why)
                await self.worker(turn.settle)
                return "leave"
            case AskAgain(why):
                log.error("the leader on %s is gone, trying again: %s", run.scheduler.leader, why)
                return None
            case QueueAgain(without, why):
                return "leave" if await self.asking.settles(run, without, why) else None
            case TakeOver(how):
                return await self._claim(run, turn, how)

    def _tried_s(self) -> float:
        """For how long the former leader's host could not be cleared."""
        now = self.clock.monotonic()
        if self.uncleared_since is None:
            self.uncleared_since = now
        return now - self.uncleared_since

    async def _claim(self, run: Run, turn: AnyTurn, how: str) -> Outcome | None:
        """The fence first, which ends a former leader that may still live; then the journal, which
        the kernel, or a file server, has let go of by then."""
        log.warning(
            "the leader on %s is gone (%s): this agent takes over", run.scheduler.leader, how
        )
        name = secrets.token_hex(8)
        taking = partial(self.storage.take_over, name)
        await self._served(taking, "the fence cannot be taken")
        self.former = Fence(leader=name, attempt=self.former.attempt if self.former else 0)
        try:
            journal = await self.worker(self.storage.open_journal, name, TAKE_OVER_S)
        except InUse as exc:
            why = f"a process of the former leader keeps the journal: {exc.message}"
            return "leave" if await self.asking.settles(run, (run.scheduler.leader,), why) else None
        return Claim(name=name, journal=journal, turn=turn, how=how)


async def see_to_the_leader(
    agent: "Agent",
    turn: int,
    backend_named: Callable[[str], AllocationBackend],
    storage: FailoverStorage,
    worker: Worker = asyncio.to_thread,
) -> None:
    """While no leader is heard, ask now and then for another agent in the place of the last one.

    A scheduler does that by itself unless the leader's host does not answer, or cannot begin one;
    hosts take turns, for the first one that lives to be enough. Later ones ask more seldom, so that
    a thousand ask no more than a few.
    """
    timeout = agent.config.agent_timeout
    following = storage.follow(agent.config.place.host)
    lines: int | None = None
    while True:
        await asyncio.sleep(SEE_S / 3)
        if agent.silent_for() < timeout + SEE_S * (turn - 1):
            lines = None
            continue
        seen = await worker(following.look)
        writes, lines, run = lines is None or seen.lines > lines, seen.lines, seen.run
        if writes or agent.silent_for() < timeout + SEE_S * turn:
            continue
        if run.job is None or run.ending is not None:
            continue
        successors = backend_named(run.job.backend).successors
        assert successors is not None, "only agents of pods wait for another leader"
        revive = partial(successors.revive_leader, run.job.launch, silent_s=agent.silent_for())
        try:
            await worker(revive)
        except BackendError as exc:
            log.error("no other leader can be had yet, trying again: %s", exc)
        await asyncio.sleep(SEE_S * turn)
