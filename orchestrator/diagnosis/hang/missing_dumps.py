"""Ranks of which there is no dump: who of them may be at the bottom of it."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping

from orchestrator.diagnosis.hang.evidence_index import Case, named
from orchestrator.diagnosis.hang.groups import Stuck, Work, label
from orchestrator.diagnosis.hang.mismatch import PATHS
from orchestrator.diagnosis.hang.report import ranks_words
from orchestrator.diagnosis.hang.verdicts import Diagnosis, Kind, RankFacts
from orchestrator.diagnosis.stacks import python_stacks
from orchestrator.diagnosis.stacks.python_stacks import Place

MOST_GUESSES = 4
"""Ranks among which a verdict may leave it open who it was."""
Suspects = tuple[tuple[int, ...], Kind, str, float]
"""Ranks of which the same is known, what that makes of them, how it is said, and how sure it is."""


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
    return stack is not None and bool(places) and python_stacks.place(stack) not in places


def _waited_for_by_the_last(case: Case) -> tuple[Counter[int], set[Place]]:
    """Ranks without a dump -> how many of those that got least far wait for them; and where these
    are in the program."""
    waits = {rank: found for rank in case.scene.dumps if (found := _waits_for(case, rank))}
    by_work: dict[Work, list[int]] = defaultdict(list)
    for rank in waits:
        by_work[case.work[rank]].append(rank)
    votes: Counter[int] = Counter()
    places: set[Place] = set()
    for ranks in by_work.values():
        done = {rank: _done(case, rank) for rank in ranks}
        least = min(done.values())
        for rank in ranks:
            if done[rank] == least:
                votes.update(waits[rank])
                if stack := case.stacks.get(rank):
                    places.add(python_stacks.place(stack))
    return votes, places


def _waits_for(case: Case, rank: int) -> set[int]:
    """Ranks without a dump that keep `rank` where it is; none where a dump shows who does."""
    dumps, dump = case.scene.dumps, case.scene.dumps[rank]
    if dump.first is not None:
        stuck = case.at.get(dump.first)  # none where its operations are not numbered in order
        unsure = stuck is not None and rank in stuck.entered and not stuck.missing
        return set(stuck.unknown) if stuck is not None and unsure else set()
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


def went_past(case: Case) -> Diagnosis | None:
    """Ranks with whom others did already what comes after an operation that they are missing from,
    and that their peers wait in: they left it out."""
    if case.partial:
        return None  # how many operations a rank did is not known of all
    reached = _reached(case)
    found = {
        rank: (stuck, after) for stuck in case.stuck for rank, after in _past(case, stuck, reached)
    }
    if not 0 < len(found) <= MOST_GUESSES:
        return None
    ranks = tuple(sorted(found))
    stuck, _ = found[ranks[0]]
    return Diagnosis(
        kind="skipped",
        scope="user",
        ranks=ranks,
        hosts=(),
        confidence=0.6 if len(ranks) == 1 else 0.3,
        cause=f"{ranks_words(ranks)} left out what the others wait in: {named(stuck)}",
        evidence=tuple(
            f"there is no dump of rank {rank}; others did {after} with it, which comes later"
            for rank, (_, after) in sorted(found.items())
        ),
        waiting=(case.waiting(stuck),),
        advice=PATHS,
    )


def _reached(case: Case) -> dict[int, dict[str, int]]:
    """Ranks without a dump -> the newest operation of each kind of group that is done with them."""
    reached: dict[int, dict[str, int]] = {rank: {} for rank in case.no_dump}
    for group in case.groups:
        newest = max((seat.behind for seat in group.seats.values()), default=0)
        for rank in group.members:
            if rank in reached:
                reached[rank][label(group.id)] = newest
    return reached


def _past(
    case: Case, stuck: Stuck, reached: Mapping[int, Mapping[str, int]]
) -> Iterable[tuple[int, str]]:
    """Ranks without a dump, and what more was done with them than those who wait there could do."""
    at_it: dict[int, Counter[str]] = defaultdict(Counter)
    for rank in stuck.entered:
        dump = case.scene.dumps[rank]
        if dump.first == stuck.group.id:
            done = at_it[case.stages.get(rank, 0)]
            for group, seat in dump.seats.items():
                done[label(group)] = max(done[label(group)], seat.behind)
    for rank in stuck.unknown:
        done = at_it.get(case.stages.get(rank, 0), Counter())
        for desc, newest in reached[rank].items():
            if desc != label(stuck.group.id) and newest > done[desc] > 0:
                yield rank, f"operation {newest} of {desc}"


def not_waiting(case: Case) -> Diagnosis | None:
    """Ranks that wait for nobody, as the kernel and their stacks say, however little dumps do."""
    return _first(
        case,
        (tuple(sorted(case.odd_states)), "stopped", "", 0.97),
        (case.mute, "stopped", "gave no stack when it was asked", 0.92),
        (
            python_stacks.outside(case.stacks),
            "alone",
            "is in no operation, as most others are",
            0.8,
        ),
    )


def without_dumps(case: Case) -> Diagnosis | None:
    """Ranks that differ from the others, which need not mean much: of dumps that leave out what is
    complete, a rank that has finished its work differs as well."""
    if case.partial:
        return None
    return _first(
        case,
        (_lonely(case), "alone", "is where no other rank is", 0.8),
        (_behind(case.scene.facts.values()), "alone", "reported fewer steps than the others", 0.7),
    )


def _lonely(case: Case) -> tuple[int, ...]:
    """Not one whose own dump shows that it waits for others."""
    return tuple(rank for rank in python_stacks.lonely(case.stacks) if rank not in case.waiters)


def _first(case: Case, *suspects: Suspects) -> Diagnosis | None:
    facts = case.scene.facts
    if case.stuck and not case.no_dump and not any(stuck.lacks for stuck in case.stuck):
        return None
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
