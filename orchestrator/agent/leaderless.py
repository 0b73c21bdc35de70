"""What agents do whose leader is gone.

Where a job has its hosts for as long as it runs, they have the scheduler queue it again, without
the leader's host; where the scheduler replaces hosts that are lost, they see to it that it does.

A host that was cut off from a leader that lives looks the same from there. The journal, which all
hosts see, tells them apart: a leader that lives writes down that it lost this host, and what it
does about it. Then it is for this host to go.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from orchestrator.agent.agent import Agent
from orchestrator.agent.whereabouts import Term
from orchestrator.contract.events import AgentLost, Event
from orchestrator.contract.fence import read_fence
from orchestrator.contract.rundir import RunDir
from orchestrator.errors import BackendError, Ended, Unanswered
from orchestrator.locks import try_lock
from orchestrator.seams import Backend, Clock
from orchestrator.supervise.log import has_writer, read
from orchestrator.supervise.state import Run
from orchestrator.supervise.step import fold

log = logging.getLogger(__name__)

RETRY_S = 5.0
REFUSED_S = 600.0
"""How long a scheduler is asked that answers and refuses; one that does not answer is asked for
as long as this host is left to us."""
TURN_S = 400.0
"""For the one whose turn it is: longer than Slurm takes to give up a node. A file server may keep
the lock of a host that died in its turn."""

LOOK_S = 5.0
"""For a leader that lives to write something: it gives up a host about when that gives it up."""
GIVEN_UP_S = 30.0
"""The same where it has given this host up, and it is not sure that it has gone on since."""

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
    """It has written since, and has not died of it."""
    return now.lines > before.lines and now.led


def queue_again(
    run_dir: RunDir, term: Term, host: str, backend_named: Callable[[str], Backend], clock: Clock
) -> None:
    """Ask until the scheduler has taken the job back, or until it is not ours any more.

    Nobody else would: the allocation would stand idle to its end. Every agent that is left comes
    here, and they ask one after the other: a thousand at once are more than a scheduler bears.
    """
    fence = read_fence(run_dir.fence)
    former = None if fence is None else fence.leader
    before = look(run_dir, host)
    waits_s = patience_s(before)
    if waits_s is None:
        log.info("the leader lives, and has given %s up: the job is not queued again", host)
        return
    clock.sleep(waits_s)
    begun, refused_at = clock.monotonic(), None
    with run_dir.requeue_lock.open("a") as turn:
        while (run := _still_ours(run_dir, term, former, host, before)) is not None:
            now = clock.monotonic()
            if not try_lock(turn.fileno()) and now - begun < TURN_S:
                clock.sleep(RETRY_S)
                continue
            assert run.job is not None
            try:
                backend_named(run.job.backend).requeue(run.job.launch, (run.leader,))
            except Ended as exc:
                log.info("the job is not queued again: %s", exc)
                return
            except Unanswered as exc:
                log.error("the job is not queued again yet, asking again: %s", exc)
                refused_at = None
            except BackendError as exc:
                refused_at = now if refused_at is None else refused_at
                if now - refused_at >= REFUSED_S:
                    log.error(
                        "the job could not be queued again, and its hosts stand idle: `ndctl cancel"
                        " %s` gives them back, and `ndctl submit SPEC --resume` goes on: %s",
                        run.job.launch.job,
                        exc,
                    )
                    return
                log.error("the scheduler does not take the job back, asking again: %s", exc)
            else:
                log.info("the job is queued again, without %s, whose leader is gone", run.leader)
                return
            clock.sleep(RETRY_S)


def _still_ours(
    run_dir: RunDir, term: Term, former: str | None, host: str, before: Seen
) -> Run | None:
    """The job, if nobody has ended it or leads it again, and its leader is as dead as it was."""
    seen, now = look(run_dir, host), read_fence(run_dir.fence)
    run = seen.run
    if run.job is None or run.ending is not None:
        log.info("the job is over: it is not queued again")
        return None
    if run.job.launch.launch != term.launch or (now is not None and now.leader != former):
        log.info("another leader has the job: it is not queued again")
        return None
    if lives(before, seen):
        log.info("%s was cut off from a leader that lives: the job is not queued again", host)
        return None
    return run


async def see_to_the_leader(
    agent: Agent, turn: int, backend_named: Callable[[str], Backend]
) -> None:
    """While no leader is heard, ask now and then for another agent in the place of the last one.

    A scheduler does that by itself unless the leader's host does not answer; hosts take turns, for
    the first one that lives to be enough.
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
        if run.job is None or run.ending is not None or not run.leader:
            continue
        backend = backend_named(run.job.backend)
        try:
            silent_s = agent.silent_for()
            replaced = partial(backend.replace, run.job.launch, run.leader, silent_s=silent_s)
            await asyncio.to_thread(replaced)
        except BackendError as exc:
            log.error("whether %s can be replaced is not known: %s", run.leader, exc)
        await asyncio.sleep(SEE_S)
