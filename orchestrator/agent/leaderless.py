"""What agents do whose leader is gone.

Where a job has its hosts for as long as it runs, they have the scheduler queue it again, without
the leader's host; where the scheduler replaces hosts that are lost, they see to it that it does.

A host that was cut off from a leader that lives looks the same from there. The journal, which all
hosts see, tells them apart: a leader that lives writes down that it lost this host, and what it
does about it. Then it is for this host to go.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from orchestrator.agent.agent import Agent
from orchestrator.agent.patience import once_it_serves
from orchestrator.agent.whereabouts import Term
from orchestrator.contract.events import AgentLost, Event
from orchestrator.contract.fence import Fence, read_fence
from orchestrator.contract.rundir import RunDir
from orchestrator.errors import BackendError, Ended, Unanswered
from orchestrator.locks import try_lock
from orchestrator.seams import Backend, Clock
from orchestrator.supervise.log import has_writer, read
from orchestrator.supervise.state import Run
from orchestrator.supervise.step import fold

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


def look(run_dir: RunDir, host: str) -> Seen:
    entries = read(run_dir.journal)
    run = fold(entry.event for entry in entries)
    last = entries[-1].event if entries else None
    return seen_by(host, run, len(entries), last, led=_is_led(run_dir))


@dataclass(slots=True)
class Eye:
    """Reads the journal again when it has grown: of a large job it is long, hosts wait for their
    turn for minutes, and there may be a thousand of them."""

    run_dir: RunDir
    host: str
    size: int = -1
    seen: Seen | None = None

    def look(self) -> Seen:
        led = _is_led(self.run_dir)  # to open a file has an NFS client ask for its size
        journal = self.run_dir.journal
        size = journal.stat().st_size if journal.exists() else 0
        if self.seen is None or size != self.size:
            self.seen, self.size = look(self.run_dir, self.host), size
        else:
            self.seen = replace(self.seen, led=led)
        return self.seen


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
    eye = Eye(run_dir, host)
    before = once_it_serves(eye.look, UNREADABLE, clock)
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
        return
    looked = clock.monotonic()
    clock.sleep(waits_s)
    begun, asking = clock.monotonic(), _Asking(term, host, backend_named, clock)
    still_ours = partial(_still_ours, eye, term, fence, before)
    opened = partial(run_dir.requeue_lock.open, "a")
    with once_it_serves(opened, "hosts cannot take turns", clock) as turn:
        while (seen := once_it_serves(still_ours, UNREADABLE, clock)) is not None:
            now = clock.monotonic()
            doubts = in_doubt(before, seen, now - looked)
            its_turn = not doubts and (try_lock(turn.fileno()) or now - begun >= TURN_S)
            if its_turn and asking.settles(seen.run):
                return
            clock.sleep(RETRY_S)


@dataclass(slots=True)
class _Asking:
    term: Term
    host: str
    backend_named: Callable[[str], Backend]
    clock: Clock
    refused_at: float | None = None

    def settles(self, run: Run) -> bool:
        """Ask the scheduler once to take the job back; whether there is no more to be done."""
        assert run.job is not None
        launch, backend = run.job.launch, self.backend_named(run.job.backend)
        try:
            led = runs_without_leader(run, self.term) == 0
            granted = None if led else backend.allocation(launch)
            without = to_leave_out(run, self.term, self.host, granted.hosts if granted else ())
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
            log.info("the job is queued again, without %s: its leader is gone", named)
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


def _still_ours(eye: Eye, term: Term, former: Fence | None, before: Seen) -> Seen | None:
    """The journal, if nobody has ended the job or leads it again, and its leader does not go on."""
    seen, now = eye.look(), read_fence(eye.run_dir.fence)
    run, leader = seen.run, None if former is None else former.leader
    if run.job is None or run.ending is not None:
        log.info("the job is over: it is not queued again")
        return None
    if run.job.launch.launch != term.launch or (now is not None and now.leader != leader):
        log.info("another leader has the job: it is not queued again")
        return None
    if lives(before, seen):
        log.info("%s was cut off from a leader that lives: the job is not queued again", eye.host)
        return None
    return seen


async def see_to_the_leader(
    agent: Agent, turn: int, backend_named: Callable[[str], Backend]
) -> None:
    """While no leader is heard, ask now and then for another agent in the place of the last one.

    A scheduler does that by itself unless the leader's host does not answer, or cannot begin one;
    hosts take turns, for the first one that lives to be enough. Later ones ask more seldom, so that
    a thousand ask no more than a few.
    """
    run_dir, timeout = agent.config.place.run_dir, agent.config.agent_timeout
    lines: int | None = None
    while True:
        await asyncio.sleep(SEE_S / 3)
        if agent.silent_for() < timeout + SEE_S * (turn - 1):
            lines = None
            continue
        seen = await asyncio.to_thread(look, run_dir, agent.config.place.host)
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
