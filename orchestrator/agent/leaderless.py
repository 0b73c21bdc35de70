"""What agents do whose leader is gone.

Where a job has its hosts for as long as it runs, they have the scheduler queue it again, without
the leader's host; where the scheduler replaces hosts that are lost, they see to it that it does.

A host that was cut off from a leader that lives looks the same from there. The journal, which all
hosts see, tells them apart: a leader that lives writes down that it lost this host, and what it
does about it. Then it is for this host to go.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING

from orchestrator.agent.patience import once_it_serves
from orchestrator.agent.whereabouts import Term
from orchestrator.contract.events import AgentLost, Event
from orchestrator.contract.fence import Fence, read_fence
from orchestrator.contract.rundir import RunDir
from orchestrator.errors import BackendError, Ended, Unanswered
from orchestrator.locks import try_lock
from orchestrator.seams import Backend, Clock
from orchestrator.supervise.log import Tail, has_writer, last_before
from orchestrator.supervise.snapshot import recall
from orchestrator.supervise.state import Run
from orchestrator.supervise.step import step

if TYPE_CHECKING:
    from orchestrator.agent.agent import Agent

log = logging.getLogger(__name__)

UNREADABLE = "the journal cannot be read"
RETRY_S = 5.0
REFUSED_S = 600.0
"""How long a scheduler is asked that answers and refuses; one that does not answer is asked for
as long as this host is left to us."""
TURN_S = 400.0
"""For the one whose turn it is: longer than Slurm takes to give up a node. A file server may keep
the lock of a host that died in its turn."""

UNLED = 3
"""Runs in a row in which no leader began: another one would not help."""

LOOK_S = 5.0
"""For a leader that lives to write something: it gives up a host about when that gives it up."""
GIVEN_UP_S = 30.0
"""The same where it writes of other things alone, or has given this host up and it is not sure that
it has gone on since."""
STRANGER_S = 120.0
"""The same where it never heard this host: longer than a file server keeps the lock of a dead one,
by default 90 s."""
NEVER_HEARD = (
    "%s was never heard by the leader on %s, which lives: the job is not queued again; look at the"
    " network between the two"
)

SEE_S = 30.0
"""Longer than a leader whose host lives takes to come back; and how long each host waits for the
one before it to have done something about it."""


@dataclass(frozen=True, slots=True)
class Seen:
    """The journal at some time, as this host reads it."""

    run: Run
    lines: int
    led: bool
    """Some process holds it for writing: a leader that lives, or one whose host was lost so lately
    that the file server keeps its lock."""
    given_up: bool
    """The leader has lost this host, and has not heard from it since …"""
    goes_on: bool
    """… and has written more, or other hosts are there to see whether it does."""


class Following:
    """The journal, of which each further look reads what it has gained since the last one."""

    def __init__(self, run_dir: RunDir, host: str) -> None:
        self.run_dir, self.host = run_dir, host
        self.forget()

    def forget(self) -> None:
        self.run, self.tail = Run(), Tail(self.run_dir.journal)
        self.last: Event | None = None
        self.begun = False

    def _begin(self) -> None:
        """From a snapshot, where there is one."""
        run, tail = recall(self.run_dir)
        before = last_before(tail.path, tail.place) if tail.lines else None
        self.run, self.tail, self.last = run, tail, before.event if before else None
        self.begun = True

    def look(self) -> Seen:
        if size_of(self.run_dir.journal) < self.tail.offset:
            self.forget()  # it is another run's, begun with --new
        if not self.begun:
            self._begin()
        for entry in self.tail.each():
            self.run, _ = step(self.run, entry.event)
            self.last = entry.event
        led = _is_led(self.run_dir)
        return seen_by(self.host, self.run, self.tail.lines, self.last, led=led)


def size_of(journal: Path) -> int:
    try:
        return journal.stat().st_size
    except FileNotFoundError:
        return 0


def _is_led(run_dir: RunDir) -> bool:
    try:
        return has_writer(run_dir.journal)
    except OSError:  # a file system without locks: its lines alone tell
        return True


def seen_by(host: str, run: Run, lines: int, last: Event | None, *, led: bool) -> Seen:
    known = run.hosts.get(host)
    given_up = known is not None and not known.alive
    others = any(h.alive for h in run.hosts.values() if h.name not in (host, run.leader))
    more = not (isinstance(last, AgentLost) and last.host == host)
    return Seen(run, lines, led, given_up, others or more)


def patience_s(before: Seen) -> float | None:
    """How long to wait for a line of the leader before the scheduler is asked; None: it lives, and
    this host is none of its job any more.

    A leader that gave up its only other host and died since, whatever it wrote in between, leaves
    that host as the only one that can have the job queued again.
    """
    if before.given_up and before.goes_on and before.led:
        return None
    return GIVEN_UP_S if before.given_up else LOOK_S


def lives(before: Seen, now: Seen) -> bool:
    """It has written since, and has not died of it, and does without this host."""
    return _writes(before, now) and now.given_up


def in_doubt(before: Seen, now: Seen, waited_s: float) -> bool:
    """It has written since, and not of this host: late, or cut off itself from all the others, when
    it gives nobody up."""
    return _writes(before, now) and not now.given_up and waited_s < GIVEN_UP_S


def _writes(before: Seen, now: Seen) -> bool:
    return now.lines > before.lines and now.led


def queue_again(
    run_dir: RunDir, term: Term, host: str, backend_named: Callable[[str], Backend], clock: Clock
) -> None:
    """Ask until the scheduler has taken the job back, or until it is not ours any more.

    Nobody else would: the allocation would stand idle to its end. Every agent that is left comes
    here, and they ask one after the other: a thousand at once are more than a scheduler bears.
    """
    fence = once_it_serves(partial(read_fence, run_dir.fence), "the fence cannot be read", clock)
    opened = partial(run_dir.requeue_lock.open, "a+")
    with once_it_serves(opened, "hosts cannot take turns", clock) as file:
        turn = _Turn(file, clock, f"{term}, {fence}: settled\n")
        waiting = partial(_may_wait, run_dir, fence, turn, size_of(run_dir.journal))
        while not turn.has_come() and once_it_serves(waiting, UNREADABLE, clock):
            clock.sleep(RETRY_S)
        if turn.is_settled():
            log.info("another agent has seen that the job is not to be queued again")
            return
        _queue_in_turn(run_dir, term, host, backend_named, clock, fence, turn)


def _may_wait(run_dir: RunDir, former: Fence | None, turn: "_Turn", size: int) -> bool:
    """Whether this host need not look at the journal yet: nobody writes to it, so no leader lives
    that may have given this host alone up. Then all hosts are without one, and the journal of
    weeks is not for thousands to read at the same time."""
    return (
        read_fence(run_dir.fence) == former
        and size_of(run_dir.journal) == size
        and not turn.is_settled()
    )


@dataclass(slots=True)
class _Turn:
    """Of the agents that are left, one after the other."""

    file: IO[str]
    clock: Clock
    mark: str
    """What one who finds that there is nothing to be done leaves for the others."""
    begun: float = field(init=False)

    def __post_init__(self) -> None:
        self.begun = self.clock.monotonic()

    def has_come(self) -> bool:
        try:
            free = try_lock(self.file.fileno())
        except OSError:  # a file system without locks
            return True
        return free or self.clock.monotonic() - self.begun >= TURN_S

    def settle(self) -> None:
        with contextlib.suppress(OSError):  # no room: each looks for itself
            self.file.write(self.mark)
            self.file.flush()

    def is_settled(self) -> bool:
        self.file.seek(0)
        return self.mark in self.file.read()


def _queue_in_turn(  # noqa: PLR0913 - what `queue_again` was told, and what it found
    run_dir: RunDir,
    term: Term,
    host: str,
    backend_named: Callable[[str], Backend],
    clock: Clock,
    fence: Fence | None,
    turn: _Turn,
) -> None:
    following = Following(run_dir, host)
    before = once_it_serves(following.look, UNREADABLE, clock)
    waits_s = patience_s(before)
    if waits_s is None:
        log.info("the leader lives, and has given %s up: the job is not queued again", host)
        return
    if (unled := runs_without_leader(before.run, term)) >= UNLED:
        log.error(
            "no leader has begun in %s allocations in a row: the job is not queued again; %s say"
            " why, and then `ndctl submit SPEC --resume` goes on",
            unled,
            run_dir.agent_log("*"),
        )
        turn.settle()
        return
    looked = clock.monotonic()
    clock.sleep(waits_s)
    asking = Asking(backend_named, clock, "its leader is gone", partial(_without, term, host))
    still_ours = partial(_still_ours, following, term, fence, before, turn)
    while (seen := once_it_serves(still_ours, UNREADABLE, clock)) is not None:
        waited_s, stranger = clock.monotonic() - looked, is_stranger(seen, term, host)
        if stranger and waited_s >= STRANGER_S:
            log.error(NEVER_HEARD, host, seen.run.leader)
            return
        doubts = stranger or in_doubt(before, seen, waited_s)
        if not doubts and turn.has_come() and asking.settles(seen.run):
            return
        clock.sleep(RETRY_S)


@dataclass(slots=True)
class Asking:
    """Of a scheduler, to take a job back."""

    backend_named: Callable[[str], Backend]
    clock: Clock
    why: str
    without: Callable[[Run, Backend], Sequence[str]]
    """The hosts to leave out. Raises BackendError."""
    refused_at: float | None = None

    def settles(self, run: Run) -> bool:
        """Ask once; whether there is no more to be done."""
        assert run.job is not None
        launch, backend = run.job.launch, self.backend_named(run.job.backend)
        try:
            without = self.without(run, backend)
            backend.requeue(launch, without)
        except Ended as exc:
            log.info("the job is not queued again: %s", exc)
        except Unanswered as exc:
            log.error("the job is not queued again yet, asking again: %s", exc)
            self.refused_at = None
            return False
        except BackendError as exc:
            return self._refused(launch.job, exc)
        else:
            named = ", ".join(without) or "any host left out"
            log.info("the job is queued again, without %s: %s", named, self.why)
        return True

    def _refused(self, job: str, why: BackendError) -> bool:
        now = self.clock.monotonic()
        self.refused_at = now if self.refused_at is None else self.refused_at
        if now - self.refused_at < REFUSED_S:
            log.error("the scheduler does not take the job back, asking again: %s", why)
            return False
        log.error(
            "the job could not be queued again, and its hosts stand idle: `ndctl cancel %s` gives"
            " them back, and `ndctl submit SPEC --resume` goes on: %s",
            job,
            why,
        )
        return True


def _without(term: Term, host: str, run: Run, backend: Backend) -> tuple[str, ...]:
    assert run.job is not None
    led = runs_without_leader(run, term) == 0
    granted = None if led else backend.allocation(run.job.launch)
    return to_leave_out(run, term, host, granted.hosts if granted else ())


def is_stranger(seen: Seen, term: Term, host: str) -> bool:
    """Whether the leader of this run lives and never heard `host`: it may well train without it,
    of which it writes nothing. To have the job queued again would end what the others do, and so in
    each run that has this host."""
    return seen.led and runs_without_leader(seen.run, term) == 0 and host not in seen.run.hosts


def runs_without_leader(run: Run, term: Term) -> int:
    """How many runs of the scheduler there were, this one included, since a leader began in one."""
    led = -1 if run.allocation is None else run.allocation.restarts
    return term.restarts - led


def to_leave_out(run: Run, term: Term, host: str, granted: Sequence[str]) -> tuple[str, ...]:
    """The host of the leader that is gone. Where none has begun in this run the journal knows the
    one before, and it is the first of the hosts that were granted that should have led."""
    if runs_without_leader(run, term) == 0:
        return (run.leader,)
    return tuple(name for name in granted[:1] if name != host)


def _still_ours(
    following: Following, term: Term, former: Fence | None, before: Seen, turn: _Turn
) -> Seen | None:
    """The journal, if nobody has ended the job or leads it again, and its leader does not go on."""
    seen, now = following.look(), read_fence(following.run_dir.fence)
    run, leader = seen.run, None if former is None else former.leader
    if run.job is None or run.ending is not None:
        log.info("the job is over: it is not queued again")
        turn.settle()
        return None
    if run.job.launch.launch != term.launch or (now is not None and now.leader != leader):
        log.info("another leader has the job: it is not queued again")
        turn.settle()
        return None
    if lives(before, seen):
        host = following.host
        log.info("%s was cut off from a leader that lives: the job is not queued again", host)
        return None
    return seen


async def see_to_the_leader(
    agent: "Agent", turn: int, backend_named: Callable[[str], Backend]
) -> None:
    """While no leader is heard, ask now and then for another agent in the place of the last one.

    A scheduler does that by itself unless the leader's host does not answer, or cannot begin one;
    hosts take turns, for the first one that lives to be enough. Later ones ask more seldom, so that
    a thousand ask no more than a few.
    """
    run_dir, timeout = agent.config.place.run_dir, agent.config.agent_timeout
    following = Following(run_dir, agent.config.place.host)
    lines: int | None = None
    while True:
        await asyncio.sleep(SEE_S / 3)
        if agent.silent_for() < timeout + SEE_S * (turn - 1):
            lines = None
            continue
        seen = await asyncio.to_thread(following.look)
        writes, lines, run = lines is None or seen.lines > lines, seen.lines, seen.run
        if writes or agent.silent_for() < timeout + SEE_S * turn:
            continue
        if run.job is None or run.ending is not None:
            continue
        revive = partial(
            backend_named(run.job.backend).revive_leader,
            run.job.launch,
            silent_s=agent.silent_for(),
        )
        try:
            await asyncio.to_thread(revive)
        except BackendError as exc:
            log.error("no other leader can be had yet, trying again: %s", exc)
        await asyncio.sleep(SEE_S * turn)
