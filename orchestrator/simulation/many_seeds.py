"""Simulate many seeds on all cores and summarise the outcomes."""

import multiprocessing
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

from orchestrator.dashboard.format import count
from orchestrator.simulation.run import Outcome, simulate
from orchestrator.simulation.scenario import KINDS

CHUNK = 10
"""Seeds that a worker process takes at a time."""
SHOWN = 5
"""Failed seeds that the summary lists with their commands."""


@dataclass(slots=True)
class Summary:
    """Totals over many seeds."""

    seeds: int = 0
    endings: Counter[str] = field(default_factory=Counter)
    broken: list[Outcome] = field(default_factory=list)
    events: int = 0
    lines: int = 0
    attempts: int = 0
    incidents: int = 0
    resumed: int = 0
    virtual_s: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)
    """Number of faults that were started, by kind."""
    happened: Counter[str] = field(default_factory=Counter)
    """Number of faults that had an effect, by kind. The others found nothing to break."""

    def add(self, outcome: Outcome) -> None:
        self.seeds += 1
        if outcome.broken:
            self.broken.append(outcome)
        else:
            self.endings[outcome.ending] += 1
        self.events += outcome.events
        self.lines += outcome.lines
        self.attempts += outcome.attempts
        self.incidents += outcome.incidents
        self.resumed += outcome.resumed
        self.virtual_s += outcome.virtual_s
        self.faults.update(outcome.faults)
        self.happened.update(outcome.happened)


def outcomes(
    seeds: Iterable[int], kinds: Sequence[str] = tuple(KINDS), processes: int = 1
) -> Iterator[Outcome]:
    """In any order if `processes` is more than 1."""
    one = partial(simulate, kinds=tuple(kinds))
    if processes == 1:
        yield from map(one, seeds)
        return
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        yield from pool.imap_unordered(one, seeds, CHUNK)
        pool.close()
        pool.join()


def summarise(found: Iterable[Outcome]) -> Summary:
    total = Summary()
    for outcome in found:
        total.add(outcome)
    total.broken.sort(key=lambda outcome: outcome.seed)
    return total


def command(seed: int, kinds: Sequence[str] = tuple(KINDS)) -> str:
    """The command that replays a seed and prints its history."""
    chosen = "" if tuple(kinds) == tuple(KINDS) else f" --faults {','.join(kinds)}"
    return f"ndctl simulate --seed {seed}{chosen} --trace"


def text(total: Summary, kinds: Sequence[str], took_s: float) -> str:
    endings = ", ".join(f"{number} {name}" for name, number in sorted(total.endings.items()))
    lines = [
        f"{count(total.seeds, 'seed')}: {endings or 'none ended'}, {len(total.broken)} broke a law",
        f"{count(total.attempts, 'attempt')}, {count(total.incidents, 'incident')},"
        f" {count(total.lines, 'journal line')}, {count(total.events, 'event')},"
        f" {total.virtual_s / 3600:.0f} h of virtual time; a person had to submit a job again"
        f" {count(total.resumed, 'time')}",
        _faults(total),
        f"{total.seeds / took_s:.1f} seeds/s, {total.events / took_s:.0f} events/s",
    ]
    for outcome in total.broken[:SHOWN]:
        lines.append(f"seed {outcome.seed}: {outcome.broken}")
        lines.append(f"    {command(outcome.seed, kinds)}")
    if len(total.broken) > SHOWN:
        lines.append(f"and {len(total.broken) - SHOWN} more")
    return "\n".join(lines)


def _faults(total: Summary) -> str:
    """Totals of faults, and the kinds that mostly had no effect."""
    words = f"{count(total.faults.total(), 'fault')}, {total.happened.total()} had an effect"
    seldom = [
        f"{kind} {total.happened[kind]} of {started}"
        for kind, started in sorted(total.faults.items())
        if 2 * total.happened[kind] < started
    ]
    return f"{words}; rarely: {', '.join(seldom)}" if seldom else words


def as_json(total: Summary, kinds: Sequence[str], took_s: float) -> dict[str, Any]:
    return {
        **{each.name: getattr(total, each.name) for each in fields(total)},
        "seconds": took_s,
        "broken": [
            {"seed": one.seed, "law": one.broken, "command": command(one.seed, kinds)}
            for one in total.broken
        ],
    }
