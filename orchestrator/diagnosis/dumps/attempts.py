"""Selects the dumps in a folder that belong to one hang: the newest ones that fit together.

If two jobs or two attempts wrote to a folder, some ranks have two dumps, and some have only an old
one. Mixing them would compare operations that never met. Pure.
"""

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from orchestrator.diagnosis.dumps.dump import DumpTimes, RankDump

SLACK_S = 60.0
"""Seconds by which clocks of hosts may differ."""
APART_S = 600.0
"""Seconds between the writing of dumps of one hang, for dumps that contain no times."""
NUMBER = re.compile(r"\d+")


class Candidate(NamedTuple):
    rank: int
    name: str
    dump: RankDump
    times: DumpTimes

    @property
    def is_empty(self) -> bool:
        return not (self.dump.seats or self.dump.talks)

    @property
    def at(self) -> float:
        return self.times.written_s if self.times.until_s is None else self.times.until_s


def newest(candidates: Iterable[Candidate]) -> tuple[dict[int, RankDump], dict[str, str]]:
    """One dump per rank, and the others (name -> why it is skipped)."""
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
    """The same for dumps that are known to be of one attempt."""
    found = list(candidates)
    taken, second = _one_each(found[0], found) if found else ({}, {})
    return {rank: one.dump for rank, one in taken.items()}, second


def _of_another_job(anchor: Candidate, found: list[Candidate]) -> Mapping[str, str]:
    world = anchor.times.world
    return {
        one.name: f"of another job: it has {one.times.world} ranks, and the newer {anchor.name}"
        f" {world}"
        for one in found
        if world and one.times.world and one.times.world != world
    }


def _earlier(anchor: Candidate, found: list[Candidate]) -> Mapping[str, str]:
    """Dumps that ended before everything in the newer ones began. Dumps of ranks that worked
    together overlap in time."""
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
    """The same for dumps without operations, by the time of writing."""
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
    """One dump per rank. If there are two, the one whose name follows the pattern of the newest
    dump is used, together with all others of that pattern; else the one with more information, else
    the first."""
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
        passed[one.name] = f"a second dump of rank {one.rank}{empty}; {known.name} is used"
        if not one.is_empty and _pattern(one) != _pattern(known):
            rivals.setdefault(_pattern(one), known.name)
    for rank, one in list(taken.items()):
        if _pattern(one) in rivals and not one.is_empty:
            del taken[rank]
            other = rivals[_pattern(one)]
            passed[one.name] = f"of another set of dumps than {other}: both have dumps of one rank"
    return taken, passed


def _pattern(one: Candidate) -> str:
    """The name without the rank. Dumps that were written together have similar names."""
    return NUMBER.sub(lambda found: "#" if int(found[0]) == one.rank else found[0], one.name)
