"""What an agent that hears no leader reads of the journal: does a leader live, and does it do
without this host?

A host that was cut off from a leader that lives looks to itself as if the leader were gone. The
journal, which all hosts see, tells the two apart: a leader that lives writes down that it lost this
host, and what it does about it.
"""

from dataclasses import dataclass
from pathlib import Path

from orchestrator.contract.files.leader_file import Term
from orchestrator.contract.files.run_dir import RunDir
from orchestrator.contract.messages.events import AgentLost, Event
from orchestrator.job.state import Run
from orchestrator.job.transitions import step
from orchestrator.journal.journal import Tail, has_writer, last_before
from orchestrator.journal.snapshot import recall

UNREADABLE = "the journal cannot be read"
LOOK_S = 5.0
"""For a leader that lives to write something: it gives up a host about when that gives it up."""
GIVEN_UP_S = 30.0
"""The same where it writes of other things alone, or has given this host up and it is not sure that
it has gone on since."""
STRANGER_S = 120.0
"""The same where it never heard this host: longer than a file server keeps the lock of a dead one,
by default 90 s."""


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
    known = run.hosts.by_name.get(host)
    given_up = known is not None and not (known.alive or known.back)
    others = any(
        h.alive for h in run.hosts.by_name.values() if h.name not in (host, run.scheduler.leader)
    )
    more = not (isinstance(last, AgentLost) and last.host == host)
    return Seen(run, lines, led, given_up, others or more)


def patience_s(before: Seen) -> float | None:
    """How long to wait for a line of the leader before the scheduler is asked; None: it lives, and
    this host is none of its job any more.

    A leader that gave up its only other host and died since, whatever it wrote in between, leaves
    that host as the only one that can see to the job.
    """
    if not before.led:
        return 0.0  # the kernel has let go of the journal for it: it has ended
    if before.given_up and before.goes_on:
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


def is_stranger(seen: Seen, term: Term, host: str) -> bool:
    """Whether the leader of this run lives and never heard `host`: it may well train without it,
    of which it writes nothing. To have the job queued again would end what the others do, and so in
    each run that has this host."""
    return (
        seen.led and runs_without_leader(seen.run, term) == 0 and host not in seen.run.hosts.by_name
    )


def runs_without_leader(run: Run, term: Term) -> int:
    """How many runs of the scheduler there were, this one included, since a leader began in one."""
    led = -1 if run.scheduler.allocation is None else run.scheduler.allocation.restarts
    return term.restarts - led
