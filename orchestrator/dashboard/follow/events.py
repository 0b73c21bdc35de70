"""The lines of `ndctl events`: in order of time, with heartbeats that came late and recovered
folded, and on request as they happen."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import tzinfo

from orchestrator.contract.files.run_dir import RunDir
from orchestrator.contract.messages.events import HealthChanged
from orchestrator.dashboard import format
from orchestrator.dashboard.event_text import (
    describe_decision,
    event_line,
    event_time,
    sort_by_time,
)
from orchestrator.job.hosts.acquittal import cleared
from orchestrator.job.state import Run
from orchestrator.job.transitions import step
from orchestrator.journal.journal import Entry, Tail
from orchestrator.seams import Clock

POLL_S = 0.5
NOISE = ("slow", "ok")
"""Late heartbeats, and their end. Heartbeats that stop are `silent`, which is no noise."""


def event_batches(
    run_dir: RunDir, clock: Clock, ended: Callable[[], bool], *, follow: bool
) -> Iterator[tuple[Entry, ...]]:
    """The journal, then with `follow` what is added until the job ends."""
    tail = Tail(run_dir.journal)
    yield tail.more()
    while follow:
        over = ended()  # before the last read, so that no line is missed
        yield tail.more()
        if over:
            return
        clock.sleep(POLL_S)


class QuietDecisions:
    """Finds what followed from an entry without an action: incidents whose decision led to none at
    once, for example because a restart in a new allocation first waits for its agents, and hosts
    that are no culprits any more. Reads the whole journal, in parts."""

    def __init__(self) -> None:
        self.run = Run()

    def among(self, entries: Iterable[Entry]) -> Mapping[int, Sequence[str]]:
        """`Entry.seq` -> what followed."""
        found = dict[int, Sequence[str]]()
        for entry in entries:
            before = self.run
            self.run, _ = step(before, entry.event)
            new = self.run.history.incidents[len(before.history.incidents) :]
            told = [describe_decision(new[-1])] if new and not entry.actions else []
            told += [f"{host} is cleared: {why}" for host, why in cleared(before, self.run)]
            if told:
                found[entry.seq] = told
        return found


def event_lines(
    entries: Sequence[Entry],
    zone: tzinfo | None,
    since: float = 0.0,
    *,
    heartbeats: bool = False,
    quiet: QuietDecisions | None = None,
) -> Iterator[str]:
    """A line for each entry from `since` on, in order of time.

    Args:
        heartbeats: show each change of a late heartbeat. Otherwise one line counts those between
            two other events.
        quiet: has read the entries before; None: the lines have no more than the entries.
    """
    decisions = quiet.among(entries) if quiet is not None else {}
    late: list[Entry] = []
    for entry in sort_by_time(entries):
        if event_time(entry.event) < since:
            continue
        if is_noise(entry) and not heartbeats:
            late.append(entry)
            continue
        yield from _folded(late, zone)
        late = []
        yield event_line(entry, zone, decisions.get(entry.seq, ()))
    yield from _folded(late, zone)


def is_noise(entry: Entry) -> bool:
    """Whether the entry is a late heartbeat or its end, and nothing followed from it."""
    event = entry.event
    return isinstance(event, HealthChanged) and event.health in NOISE and not entry.actions


def _folded(late: Sequence[Entry], zone: tzinfo | None) -> Iterator[str]:
    """One change is shown as it is."""
    if len(late) < 2:
        yield from (event_line(entry, zone) for entry in late)
        return
    events = [entry.event for entry in late if isinstance(entry.event, HealthChanged)]
    ranks = {rank for event in events for a, b in event.ranks for rank in range(a, b + 1)}
    oldest = max(event.age_s for event in events)
    first = format.date_time(event_time(late[0].event), zone)
    until = format.duration(event_time(late[-1].event) - event_time(late[0].event))
    times = sum(event.health == "slow" for event in events)
    yield (
        f"{first}  {format.rank_list(tuple(sorted(ranks)))}: late heartbeat"
        f" ({format.count(times, 'time')} in {until}, at most {format.duration(oldest)} ago)"
    )
