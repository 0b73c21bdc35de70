"""Ranks of which there is no dump: who of them may be at the bottom of it."""

from collections import Counter
from collections.abc import Iterable

from orchestrator.diagnosis import stacks
from orchestrator.diagnosis.case import Case
from orchestrator.diagnosis.facts import Diagnosis, Kind, RankFacts
from orchestrator.diagnosis.groups import Stuck
from orchestrator.diagnosis.words import ranks_words


def suspects(case: Case, direct: Counter[int]) -> list[int]:
    """Ranks without a dump that may be at the bottom of it.

    Of the operations that only they can be missing in, those count that come first in the
    program: a rank that waits does so before what it is missed in.
    """
    bare = [stuck for stuck in case.stuck if stuck.unknown and not stuck.missing]
    for stuck in bare:
        for rank in stuck.unknown:
            direct[rank] += len(stuck.entered)
    behind = {id(stuck): _counts_at(case, stuck) for stuck in bare}
    first = [
        stuck
        for stuck in bare
        if not any(
            behind[id(stuck)].get(other.group.id.desc, 0) >= other.seq
            for other in bare
            if other is not stuck and other.group.id.desc != stuck.group.id.desc
        )
    ]
    missed = Counter(rank for stuck in first or bare for rank in stuck.unknown)
    for peer in _unheard(case):
        missed[peer] += 1
        direct[peer] += 1
    most = max(missed.values(), default=0)
    if not _speaks_against_any(case, missed):
        return sorted(rank for rank, times in missed.items() if times == most)
    return sorted(missed)


def _counts_at(case: Case, stuck: Stuck) -> dict[str, int]:
    """How many operations of each kind of group are complete for those who wait here first."""
    counts: dict[str, int] = {}
    for rank in stuck.entered:
        dump = case.scene.dumps[rank]
        if dump.first != stuck.group.id:
            continue
        for group, seat in dump.seats.items():
            counts[group.desc] = max(counts.get(group.desc, 0), seat.done)
    return counts


def _unheard(case: Case) -> Iterable[int]:
    """Ranks without a dump to which another sends, or from which it receives."""
    for dump in case.scene.dumps.values():
        for talk in dump.talks[:1]:
            if talk.peer not in case.scene.dumps:
                yield talk.peer


def _speaks_against_any(case: Case, ranks: Iterable[int]) -> bool:
    return any(case.signs_against(rank)[1] > 0 for rank in ranks)


def without_dumps(case: Case) -> Diagnosis | None:
    facts = case.scene.facts
    if case.stuck and not case.no_dump:
        return None
    suspects: list[tuple[tuple[int, ...], Kind, str, float]] = [
        (tuple(sorted(case.odd_states)), "stopped", "", 0.97),
        (case.mute, "stopped", "gave no stack when it was asked", 0.92),
        (stacks.outsiders(case.stacks), "alone", "is where no other rank is", 0.8),
        (_behind(facts.values()), "alone", "reported fewer steps than the others", 0.7),
    ]
    for ranks, kind, why, confidence in suspects:
        hosts = {case.scene.host(rank) for rank in ranks}
        single = len(ranks) == 1 or (len(hosts) == 1 and None not in hosts)
        if not ranks or len(ranks) >= len(facts) or not single:
            continue
        sign = why or f"is {case.odd_states[ranks[0]]}"
        extra = case.signs_against(ranks[0])[0] if kind == "alone" else ()
        what = f"{ranks_words(ranks)} {sign}"
        return case.blame(kind, ranks, confidence, what, extra, case.stuck)
    return None


def _behind(facts: Iterable[RankFacts]) -> tuple[int, ...]:
    steps = {fact.rank: fact.step for fact in facts if fact.step is not None}
    newest = max(steps.values(), default=0)
    return tuple(sorted(rank for rank, step in steps.items() if step < newest))
