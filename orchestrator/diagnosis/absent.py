"""Ranks of which there is no dump: who of them may be at the bottom of it."""

from collections import Counter, defaultdict
from collections.abc import Iterable

from orchestrator.diagnosis import stacks
from orchestrator.diagnosis.case import Case
from orchestrator.diagnosis.facts import Diagnosis, Kind, RankFacts
from orchestrator.diagnosis.stacks import Place
from orchestrator.diagnosis.words import ranks_words


def suspects(case: Case, direct: Counter[int]) -> list[int]:
    """Ranks without a dump that may be at the bottom of it.

    All that may be, where something else speaks against one of them. Else those for whom the ranks
    wait that got least far: whoever waits further on waits for these.
    """
    missed: set[int] = set()
    for stuck in case.stuck:
        if stuck.unknown and not stuck.missing:
            missed.update(stuck.unknown)
            for rank in stuck.unknown:
                direct[rank] += len(stuck.entered)
    for peer in _unheard(case):
        missed.add(peer)
        direct[peer] += 1
    if any(case.signs_against(rank)[1] > 0 for rank in missed):
        return sorted(missed)
    votes, places = _waited_for_by_the_last(case)
    most = max(votes.values(), default=0)
    likely = sorted(rank for rank, times in votes.items() if times == most) or sorted(missed)
    return [rank for rank in likely if _is_elsewhere(case, rank, places)] or likely


def _is_elsewhere(case: Case, rank: int, places: set[Place]) -> bool:
    """Its stack shows it inside another operation than those who wait for it."""
    stack = case.stacks.get(rank)
    return stack is not None and bool(places) and stacks.place(stack) not in places


def _waited_for_by_the_last(case: Case) -> tuple[Counter[int], set[Place]]:
    """Ranks without a dump -> how many of those that got least far wait for them; and where these
    are in the program."""
    waits = {rank: found for rank in case.scene.dumps if (found := _waits_for(case, rank))}
    by_kind: dict[object, list[int]] = defaultdict(list)
    for rank in waits:
        seats = case.scene.dumps[rank].seats
        kind = case.stages.get(rank, 0), frozenset(group.desc for group in seats)
        by_kind[kind].append(rank)
    votes: Counter[int] = Counter()
    places: set[Place] = set()
    for ranks in by_kind.values():
        done = {rank: _done(case, rank) for rank in ranks}
        least = min(done.values())
        for rank in ranks:
            if done[rank] == least:
                votes.update(waits[rank])
                if stack := case.stacks.get(rank):
                    places.add(stacks.place(stack))
    return votes, places


def _waits_for(case: Case, rank: int) -> set[int]:
    """Ranks without a dump that keep `rank` where it is."""
    dumps, dump = case.scene.dumps, case.scene.dumps[rank]
    if dump.first is not None:
        stuck = case.at[dump.first]
        return set(stuck.unknown) if rank in stuck.entered else set()
    return {talk.peer for talk in dump.talks[:1] if talk.peer not in dumps}


def _done(case: Case, rank: int) -> int:
    """How many operations: ranks of one stage do the same ones."""
    return sum(seat.behind for seat in case.scene.dumps[rank].seats.values())


def _unheard(case: Case) -> Iterable[int]:
    """Ranks without a dump to which another sends, or from which it receives."""
    for dump in case.scene.dumps.values():
        for talk in dump.talks[:1]:
            if talk.peer not in case.scene.dumps:
                yield talk.peer


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
