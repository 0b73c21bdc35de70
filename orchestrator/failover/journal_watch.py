"""Reads in the journal whether a leader is alive, and whether it has given up this host.

A host that is cut off from a live leader cannot tell this from a lost leader. The journal, which
all hosts see, shows the difference: a live leader writes that it lost this host, and what it does
about it.
"""

from pathlib import Path

from msgspec import Struct

from orchestrator.contract.files.leader_file import Term
from orchestrator.contract.files.run_dir import RunDir
from orchestrator.contract.messages.events import AgentLost, Event
from orchestrator.job.state import Run
from orchestrator.job.transitions import step
from orchestrator.journal.journal import Tail, has_writer, last_before
from orchestrator.journal.snapshot import recall

UNREADABLE = "failed to read the journal"
LOOK_S = 5.0
"""Time for a live leader to write something: leader and host give each other up at about the same
time."""
GIVEN_UP_S = 30.0
"""The same if the leader has written only about other things, or has given up this host and may
have died since."""
STRANGER_S = 120.0
"""The same if the leader never heard this host: longer than a file server keeps the lock of a dead
leader (90 s by default)."""


class Seen(Struct, frozen=True):
    """The state of the journal as this host reads it."""

    run: Run
    lines: int
    led: bool
    """A process has the journal open for writing: a live leader, or one whose host was lost so
    recently that the file server still keeps its lock."""
    given_up: bool
    """The leader has lost this host, and has not heard it again, ..."""
    goes_on: bool
    """... and it has written more since, or other hosts can check whether it does."""
    awaited: bool
    """The leader has not heard this host yet, and waits for it since it took over."""


class Following:
    """Reads the journal. Each `look` reads only what was added since the last one."""

    def __init__(self, run_dir: RunDir, host: str) -> None:
        self.run_dir, self.host = run_dir, host
        self.forget()

    def forget(self) -> None:
        self.run, self.tail = Run(), Tail(self.run_dir.journal)
        self.last: Event | None = None
        self.begun = False

    def _begin(self) -> None:
        """Start from a snapshot, if there is one."""
        run, tail = recall(self.run_dir)
        before = last_before(tail.path, tail.place) if tail.lines else None
        self.run, self.tail, self.last = run, tail, before.event if before else None
        self.begun = True

    def look(self) -> Seen:
        if size_of(self.run_dir.journal) < self.tail.offset:
            self.forget()  # `ndctl submit --new` started another journal
        # Not in `__init__`: it may read a snapshot, which blocks.
        if not self.begun:
            self._begin()
        for entry in self.tail.each():
            self.run, _ = step(self.run, entry.event)
            self.last = entry.event
        # Asked after the lines are read, so that a leader that has ended since cannot count as
        # alive.
        led = _is_led(self.run_dir)
        return seen_by(self.host, self.run, self.tail.lines, self.last, led=led)


def size_of(journal: Path) -> int:
    try:
        return journal.stat().st_size
    # No leader has started yet, so there is nothing to read.
    except FileNotFoundError:
        return 0


def _is_led(run_dir: RunDir) -> bool:
    try:
        return has_writer(run_dir.journal)
    except OSError:  # a file system without locks: only new lines can show that a leader is alive
        return True


def seen_by(host: str, run: Run, lines: int, last: Event | None, *, led: bool) -> Seen:
    known = run.hosts.by_name.get(host)
    given_up = known is not None and not (known.alive or known.back)
    awaited = known is not None and known.back
    others = any(
        h.alive for h in run.hosts.by_name.values() if h.name not in (host, run.scheduler.leader)
    )
    # A leader that wrote only the loss of this host may have died right after it.
    more = not (isinstance(last, AgentLost) and last.host == host)
    return Seen(run, lines, led, given_up, others or more, awaited)


def patience_s(before: Seen, *, heard: bool) -> float | None:
    """How long to wait for the leader to write a line before the scheduler is asked. None: the
    leader is alive, and the job continues without this host.

    If the leader gave up its only other host and then died, that host is the only one left to act.
    So it waits and then acts, although the leader has given it up.

    Args:
        heard: this host has heard the leader. If not, the leader may still have heard this host,
            and as late as a moment ago.
    """
    if not before.led:
        return 0.0  # the kernel has released the journal, so the leader's process has ended
    if before.given_up and before.goes_on:
        return None
    # The leader started later than this host began to look for it, so it gives this host up later.
    if (before.awaited or not heard) and before.run.job is not None:
        return max(GIVEN_UP_S, before.run.job.launch.agent_timeout + LOOK_S)
    return GIVEN_UP_S if before.given_up else LOOK_S


def lives(before: Seen, now: Seen) -> bool:
    """The leader has written since, is still alive, and has given up this host."""
    return writes(before, now) and now.given_up


def writes(before: Seen, now: Seen) -> bool:
    return now.lines > before.lines and now.led


def is_stranger(seen: Seen, term: Term, host: str) -> bool:
    """Whether the leader of this run is alive and never heard `host`. Then the journal says nothing
    about this host, and the job may train without it. Requeueing would stop the other hosts, and
    again in each run with this host."""
    return (
        seen.led and runs_without_leader(seen.run, term) == 0 and host not in seen.run.hosts.by_name
    )


def runs_without_leader(run: Run, term: Term) -> int:
    """Number of runs of the scheduler since the last one in which a leader started, this one
    included."""
    allocation = run.scheduler.allocation
    if allocation is None:
        # Processes of one machine have no allocation, and their leader has started in this run.
        return 0 if run.scheduler.leader else term.restarts + 1
    return term.restarts - allocation.restarts
