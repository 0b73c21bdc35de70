"""Which of the dumps in a folder are of one standstill: the newest that fit each other.

A folder that was written to by two jobs, or by two attempts of one, has ranks twice, or ranks that
only the older one left a dump of. To mix them is to compare what never met. Pure.
"""

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from orchestrator.diagnosis.dumps.dump import RankDump, Times

SLACK_S = 60.0
"""By which clocks of hosts may differ."""
APART_S = 600.0
"""Between the writing of dumps of one standstill, where they hold no operation to tell its time."""
NUMBER = re.compile(r"\d+")


class Candidate(NamedTuple):
    rank: int
    name: str
    dump: RankDump
    times: Times

    @property
    def is_empty(self) -> bool:
        return not (self.dump.seats or self.dump.talks)

    @property
    def at(self) -> float:
        return self.times.written_s if self.times.until_s is None else self.times.until_s


def newest(candidates: Iterable[Candidate]) -> tuple[dict[int, RankDump], dict[str, str]]:
    """One dump of each rank, and why the others are passed over (name -> reason)."""
    left = list(candidates)
    passed: dict[str, str] = {}
    if not left:
        return {}, passed
    anchor = max(left, key=lambda one: (not one.is_empty, one.at))
    for why_not in (_of_another_job, _earlier, _written_earlier):
        why = why_not(anchor, left)
        passed |= why
        left = [one for one in left if one.name not in why]
    taken, second = _one_each(anchor, left)
    return {rank: one.dump for rank, one in taken.items()}, {**passed, **second}


def as_of_one(candidates: Iterable[Candidate]) -> tuple[dict[int, RankDump], dict[str, str]]:
    """Where it is known that they are of one attempt."""
    found = list(candidates)
    taken, second = _one_each(found[0], found) if found else ({}, {})
    return {rank: one.dump for rank, one in taken.items()}, second


def _of_another_job(anchor: Candidate, found: list[Candidate]) -> Mapping[str, str]:
    world = anchor.times.world
    return {
        one.name: f"of another job: it has {one.times.world} ranks, and that of {anchor.name},"
        f" which is newer, {world}"
        for one in found
        if world and one.times.world and one.times.world != world
    }


def _earlier(anchor: Candidate, found: list[Candidate]) -> Mapping[str, str]:
    """What ended before all that the newer ones hold began. Of ranks that worked together, what
    their recorders hold overlaps."""
    timed = [
        one for one in found if one.times.since_s is not None and one.times.until_s is not None
    ]
    timed.sort(key=lambda one: -one.at)
    floor, passed = float("inf"), {}
    for one in timed:
        assert one.times.since_s is not None
        if floor == float("inf") or one.at >= floor - SLACK_S:
            floor = min(floor, one.times.since_s)
        else:
            passed[one.name] = (
                f"of an earlier attempt or job: its newest operation is {anchor.at - one.at:,.0f} s"
                f" older than that of {anchor.name}"
            )
    return passed


def _written_earlier(anchor: Candidate, found: list[Candidate]) -> Mapping[str, str]:
    """Of those that hold no operation."""
    last = anchor.times.written_s
    return {
        one.name: f"of an earlier attempt or job: written {last - one.times.written_s:,.0f} s"
        f" before {anchor.name}"
        for one in found
        if one.times.until_s is None and one.times.written_s < last - APART_S
    }


def _one_each(
    anchor: Candidate, found: list[Candidate]
) -> tuple[dict[int, Candidate], dict[str, str]]:
    """Of two of one rank the one that is named as the newest of all is, with all others that are
    named so; else the one that tells more, which is the first where they tell the same."""
    kind = _pattern(anchor)
    order = sorted(found, key=lambda one: (one.is_empty, _pattern(one) != kind, one.name))
    taken: dict[int, Candidate] = {}
    rivals: dict[str, str] = {}
    passed: dict[str, str] = {}
    for one in order:
        known = taken.setdefault(one.rank, one)
        if known is one:
            continue
        empty = ", and empty" if one.is_empty and not known.is_empty else ""
        passed[one.name] = f"a second dump of rank {one.rank}{empty}; {known.name} is taken"
        if not one.is_empty and _pattern(one) != _pattern(known):
            rivals.setdefault(_pattern(one), known.name)
    for rank, one in list(taken.items()):
        if _pattern(one) in rivals and not one.is_empty:
            del taken[rank]
            other = rivals[_pattern(one)]
            passed[one.name] = f"of another set of dumps than {other}: both have dumps of one rank"
    return taken, passed


def _pattern(one: Candidate) -> str:
    """Its name without its rank: dumps that were written together are named alike."""
    return NUMBER.sub(lambda found: "#" if int(found[0]) == one.rank else found[0], one.name)
