"""Finds suspects among the ranks without a dump."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping

from orchestrator.diagnosis.hang.evidence_index import EvidenceIndex, named
from orchestrator.diagnosis.hang.groups import Stuck, Work, label
from orchestrator.diagnosis.hang.mismatch import PATHS
from orchestrator.diagnosis.hang.report import ranks_words
from orchestrator.diagnosis.hang.verdicts import Diagnosis, Kind, RankFacts
from orchestrator.diagnosis.stacks import python_stacks
from orchestrator.diagnosis.stacks.python_stacks import Place

MOST_GUESSES = 4
"""A verdict names at most so many possible culprits."""
Suspects = tuple[tuple[int, ...], Kind, str, float]
"""Ranks with the same evidence, the verdict, its text, and its confidence (0 to 1)."""


def suspects(case: EvidenceIndex, direct: Counter[int]) -> list[int]:
    """Ranks without a dump that may be the culprit.

    If there is other evidence against one of them: all of them, and that evidence decides later.
    Otherwise those for which the least advanced ranks wait: ranks further on wait for these.
    """
    missed: set[int] = set()
    for stuck in case.stuck:
        # Where a dump shows a missing member, that member explains the wait, and ranks without a
        # dump are not needed to explain it.
        if stuck.unknown and not stuck.missing:
            missed.update(stuck.unknown)
            for rank in stuck.unknown:
                direct[rank] += len(stuck.entered)
    for peer in _unheard(case):
        missed.add(peer)
        direct[peer] += 1
    # Do not narrow the choice by votes here: a stopped process outweighs any count of waiting
    # ranks.
    if any(case.signs_against(rank)[1] > 0 for rank in missed):
        return sorted(missed)
    votes, places = _waited_for_by_the_last(case)
    most = max(votes.values(), default=0)
    likely = sorted(rank for rank, times in votes.items() if times == most) or sorted(missed)
    # Example: two of four ranks gave no dump, and the stack of one is in the same all-reduce as its
    # peers. Only the other one is likely. If stacks exclude all, they decide nothing.
    return [rank for rank in likely if _is_elsewhere(case, rank, places)] or likely


def _is_elsewhere(case: EvidenceIndex, rank: int, places: set[Place]) -> bool:
    """Its stack is in another operation than the stacks of the ranks that wait for it."""
    stack = case.stacks.get(rank)
    return stack is not None and bool(places) and python_stacks.place(stack) not in places


def _waited_for_by_the_last(case: EvidenceIndex) -> tuple[Counter[int], set[Place]]:
    """Rank without a dump -> number of least advanced ranks that wait for it; and their places."""
    waits = {rank: found for rank in case.scene.dumps if (found := _waits_for(case, rank))}
    by_work: dict[Work, list[int]] = defaultdict(list)
    for rank in waits:
        # Counts of operations can be compared only between ranks with the same work: an evaluator
        # is always behind the trainers.
        by_work[case.work[rank]].append(rank)
    votes: Counter[int] = Counter()
    places: set[Place] = set()
    for ranks in by_work.values():
        done = {rank: _done(case, rank) for rank in ranks}
        least = min(done.values())
        for rank in ranks:
            # A rank that is further on may wait for one of these, not for the rank without a dump.
            if done[rank] == least:
                votes.update(waits[rank])
                if stack := case.stacks.get(rank):
                    places.add(python_stacks.place(stack))
    return votes, places


def _waits_for(case: EvidenceIndex, rank: int) -> set[int]:
    """Ranks without a dump that `rank` waits for; empty if a dump shows another reason."""
    dumps, dump = case.scene.dumps, case.scene.dumps[rank]
    if dump.first is not None:
        stuck = case.at.get(dump.first)  # none where its operations are not numbered in order
        unsure = stuck is not None and rank in stuck.entered and not stuck.missing
        return set(stuck.unknown) if stuck is not None and unsure else set()
    # Its oldest pending operation is a send or receive. Later ones are only queued behind it.
    return {talk.peer for talk in dump.talks[:1] if talk.peer not in dumps}


def _done(case: EvidenceIndex, rank: int) -> int:
    """Number of completed operations, comparable between ranks of one pipeline stage."""
    return sum(seat.behind for seat in case.scene.dumps[rank].seats.values())


def _unheard(case: EvidenceIndex) -> Iterable[int]:
    """Ranks without a dump that are the peer of a pending send or receive."""
    for dump in case.scene.dumps.values():
        # Only the oldest send or receive of a rank blocks it.
        for talk in dump.talks[:1]:
            if talk.peer not in case.scene.dumps:
                yield talk.peer


def went_past(case: EvidenceIndex) -> Diagnosis | None:
    """Ranks that skipped the operation in which their peers wait.

    Dumps of other ranks show later operations that completed with them.
    """
    if case.partial:
        return None  # partial dumps do not have the number of completed operations
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
        cause=f"{ranks_words(ranks)} skipped an operation in which the others wait: {named(stuck)}",
        evidence=tuple(
            f"there is no dump of rank {rank}; others completed {after} with it, which is later"
            for rank, (_, after) in sorted(found.items())
        ),
        waiting=(case.waiting(stuck),),
        advice=PATHS,
    )


def _reached(case: EvidenceIndex) -> dict[int, dict[str, int]]:
    """Rank without a dump -> the newest completed operation per kind of group it is in."""
    reached: dict[int, dict[str, int]] = {rank: {} for rank in case.no_dump}
    for group in case.groups:
        newest = max((seat.behind for seat in group.seats.values()), default=0)
        for rank in group.members:
            if rank in reached:
                reached[rank][label(group.id)] = newest
    return reached


def _past(
    case: EvidenceIndex, stuck: Stuck, reached: Mapping[int, Mapping[str, int]]
) -> Iterable[tuple[int, str]]:
    """Ranks without a dump, each with an operation that completed after the stuck one."""
    at_it: dict[int, Counter[str]] = defaultdict(Counter)
    for rank in stuck.entered:
        dump = case.scene.dumps[rank]
        # A rank whose oldest pending operation is in another group has only queued this one, so its
        # counts do not show where the ranks that wait here are.
        if dump.first == stuck.group.id:
            done = at_it[case.stages.get(rank, 0)]
            for group, seat in dump.seats.items():
                done[label(group)] = max(done[label(group)], seat.behind)
    for rank in stuck.unknown:
        done = at_it.get(case.stages.get(rank, 0), Counter())
        for desc, newest in reached[rank].items():
            # Zero means that no waiting rank used a group of this kind, so there is nothing to
            # compare with.
            if desc != label(stuck.group.id) and newest > done[desc] > 0:
                yield rank, f"operation {newest} of {desc}"


def not_waiting(case: EvidenceIndex) -> Diagnosis | None:
    """Ranks that wait for no other rank according to the kernel or their stacks."""
    return _first(
        case,
        (tuple(sorted(case.odd_states)), "stopped", "", 0.97),
        (case.mute, "stopped", "gave no stack when asked", 0.92),
        (
            python_stacks.outside(case.stacks),
            "alone",
            "is in no collective, while most other ranks are in one",
            0.8,
        ),
    )


def without_dumps(case: EvidenceIndex) -> Diagnosis | None:
    """Ranks that differ from all others in place or in number of steps: weak evidence."""
    if case.partial:
        return None  # then a rank that has finished its work differs from the others too
    return _first(
        case,
        (_lonely(case), "alone", "is at a place in the program where no other rank is", 0.8),
        (_behind(case.scene.facts.values()), "alone", "reported fewer steps than the others", 0.7),
    )


def _lonely(case: EvidenceIndex) -> tuple[int, ...]:
    """Ranks with a unique place, except those whose dump shows that they wait for others."""
    return tuple(rank for rank in python_stacks.lonely(case.stacks) if rank not in case.waiters)


def _first(case: EvidenceIndex, *suspects: Suspects) -> Diagnosis | None:
    facts = case.scene.facts
    # Every rank has a dump and every member is known. A rank's state or stack then says less than
    # the dumps, which the earlier checks read.
    if case.stuck and not case.no_dump and not any(stuck.lacks for stuck in case.stuck):
        return None
    for ranks, kind, why, confidence in suspects:
        hosts = {case.scene.host(rank) for rank in ranks}
        single = len(ranks) == 1 or (len(hosts) == 1 and None not in hosts)
        # A sign that all ranks share does not tell them apart, and ranks on several hosts have no
        # host to blame in common. One broken host explains several ranks.
        if not ranks or len(ranks) >= len(facts) or not single:
            continue
        sign = why or f"is {case.odd_states[ranks[0]]}"
        # For the other kinds the sign is the cause already.
        extra = case.signs_against(ranks[0])[0] if kind == "alone" else ()
        what = f"{ranks_words(ranks)} {sign}"
        return case.blame(kind, ranks, confidence, what, extra, case.stuck)
    return None


def _behind(facts: Iterable[RankFacts]) -> tuple[int, ...]:
    steps = {fact.rank: fact.step for fact in facts if fact.step is not None}
    newest = max(steps.values(), default=0)
    return tuple(sorted(rank for rank, step in steps.items() if step < newest))
