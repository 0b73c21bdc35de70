"""Finds collectives that do not match or come in another order: mistakes of the program."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import chain, pairwise

from orchestrator.diagnosis.dumps.dump import RankDump
from orchestrator.diagnosis.hang.evidence_index import SHOWN, EvidenceIndex, named
from orchestrator.diagnosis.hang.groups import Stuck, Work, label, odd_ones
from orchestrator.diagnosis.hang.report import ranks_wait, ranks_words, spans
from orchestrator.diagnosis.hang.verdicts import Diagnosis

Step = tuple[str, int]
"""Kind of group, and number of the operation in it."""
MANY_PEERS = 3
PATHS = (
    "ranks took different paths through the program: look for a branch before this operation that"
    " depends on the rank or on its data"
)


def mismatch(case: EvidenceIndex, operations: Sequence[Stuck] | None = None) -> Diagnosis | None:
    """The first mismatch among the stuck operations, or among other `operations`."""
    for stuck in case.stuck if operations is None else operations:
        odd = odd_ones(stuck, case.kin)
        if odd:
            return _mismatched(case, stuck, odd)
    return None


def _mismatched(case: EvidenceIndex, stuck: Stuck, odd: tuple[int, ...]) -> Diagnosis:
    called = {
        rank: call.op
        for rank, seat in stuck.group.seats.items()
        for call in seat.calls
        if call.seq == stuck.seq
    }
    # `odd_ones` names all members if it cannot tell which side is right.
    split = len(odd) == len(called)
    others = Counter(str(op) for rank, op in called.items() if rank not in odd)
    theirs = others.most_common(1)[0][0] if others else "something else"
    evidence = [f"rank {rank} called {called[rank]}" for rank in odd[:SHOWN]]
    evidence += [] if split else [f"the others called {theirs}"]
    where = named(stuck)
    cause = (
        f"ranks {spans(odd)} called operations that do not match each other as {where}"
        if split
        else f"{ranks_words(odd)} called another operation than its peers as {where}"
    )
    return Diagnosis(
        kind="mismatch",
        scope="user",
        ranks=odd,
        hosts=(),
        confidence=0.5 if split else 0.95 if len(odd) == 1 else 0.8,
        cause=cause,
        evidence=tuple(evidence),
        waiting=(case.waiting(stuck),),
        advice=PATHS,
    )


def strayed(case: EvidenceIndex) -> Diagnosis | None:
    """One rank called another next operation than all other ranks with the same work."""
    nexts: dict[Work, dict[Step, dict[Step, list[int]]]] = defaultdict(dict)
    for rank, dump in case.scene.dumps.items():
        # Ranks with other work, such as an evaluator or another pipeline stage, take another path
        # by design.
        work = nexts[case.work[rank]]
        for step, following in chain.from_iterable(map(pairwise, dump.paths)):
            work.setdefault(step, {}).setdefault(following, []).append(rank)
    for work in nexts.values():
        for step, ways in work.items():
            if len(ways) < 2:
                continue
            usual, odd = sorted(ways.items(), key=lambda way: len(way[1]), reverse=True)[:2]
            # Only one rank against several can be named. With two ranks on a path, or three paths,
            # it is open which path is the wrong one.
            single = len(odd[1]) == 1 and len(usual[1]) > 1 and len(ways) == 2
            if single:
                return _strayed(case, odd[1][0], step, odd[0], usual)
    return None


def _strayed(
    case: EvidenceIndex, rank: int, step: Step, way: Step, usual: tuple[Step, list[int]]
) -> Diagnosis:
    ops = [s for s in case.stuck if rank in {*s.missing, *s.unknown, *s.entered}]
    ops.sort(key=lambda s: (rank in s.entered, -len(s.entered), s.group.id))
    # Name the operation only if it is the one that its peers wait in for this rank.
    where = f": {named(ops[0])}" if ops and rank in ops[0].missing else ""
    return Diagnosis(
        kind="skipped",
        scope="user",
        ranks=(rank,),
        hosts=(),
        confidence=0.95 if len(usual[1]) > MANY_PEERS else 0.9,
        cause=f"rank {rank} took another path through the program than its peers{where}",
        evidence=(
            f"after operation {step[1]} of {step[0]}, rank {rank} called operation {way[1]} of"
            f" {way[0]}; {len(usual[1])} peers called operation {usual[0][1]} of {usual[0][0]}",
        ),
        waiting=tuple(case.waiting(stuck) for stuck in ops[:SHOWN]),
        advice=PATHS,
    )


def skipped(case: EvidenceIndex) -> Diagnosis | None:
    crowds: dict[tuple[str, int, Work], list[RankDump]] = defaultdict(list)
    for rank, dump in case.scene.dumps.items():
        # Compare only ranks that wait in the operation that they called last. A rank that still
        # runs is at another count because its dump is from another moment.
        if dump.last is not None and dump.seats[dump.last].pending:
            place = (label(dump.last), dump.seats[dump.last].entered, case.work[rank])
            crowds[place].append(dump)
    odd: dict[int, str] = {}
    for (desc, seq, _), crowd in crowds.items():
        known = _known_of_all(crowd)
        usual = Counter(_counts(dump, known) for dump in crowd).most_common(2)
        # All agree, or no majority shows what is usual.
        if len(usual) < 2 or usual[0][1] <= usual[1][1]:
            continue
        common = dict(usual[0][0])
        for dump in crowd:
            for other, count in _counts(dump, known):
                # A rank that called more did not skip anything.
                if count < common.get(other, 0):
                    odd[dump.rank] = (
                        f"it called operation {seq} of {desc} after {count} operations of {other};"
                        f" its peers called {common[other]} of these before"
                    )
    # If many ranks differ, the counts single out no culprit. Another order of calls may.
    if not odd or len(odd) > max(1, len(case.scene.dumps) // 4):
        return _out_of_order(case)
    ranks = tuple(sorted(odd))
    ops = [stuck for stuck in case.stuck if {*stuck.missing, *stuck.unknown} & set(ranks)]
    return Diagnosis(
        kind="skipped",
        scope="user",
        ranks=ranks,
        hosts=(),
        confidence=0.9 if len(ranks) == 1 else 0.6,
        cause=f"{ranks_words(ranks)} skipped an operation in which its peers wait"
        + (f": {named(ops[0])}" if ops else ""),
        evidence=tuple(f"rank {rank}: {odd[rank]}" for rank in ranks[:SHOWN]),
        waiting=tuple(case.waiting(stuck) for stuck in ops[:SHOWN]),
        advice=PATHS,
    )


def _out_of_order(case: EvidenceIndex) -> Diagnosis | None:
    """One rank called operations in another order: it waits in one group, its peers in another."""
    alone = {
        stuck.missing[0]: stuck
        for stuck in case.stuck
        if len(stuck.missing) == 1 and not stuck.unknown and len(stuck.entered) > 1
    }
    # In a real swap all others wait for one rank. With several such ranks this is an ordinary chain
    # of waits.
    if len(alone) != 1:
        return None
    (rank, stuck), *_ = alone.items()
    theirs = [s for s in case.stuck if rank in s.entered and len(s.missing) > len(s.entered)]
    # The rank waits in no operation that most of its peers skipped, so the order was the same.
    if not theirs:
        return None
    return Diagnosis(
        kind="skipped",
        scope="user",
        ranks=(rank,),
        hosts=(),
        confidence=0.9,
        cause=f"rank {rank} is in {named(theirs[0])} while its peers are in {named(stuck)}",
        evidence=(f"{ranks_wait(len(stuck.entered))} for it, and it waits for them",),
        waiting=(case.waiting(stuck), case.waiting(theirs[0])),
        advice=PATHS,
    )


def _known_of_all(crowd: Sequence[RankDump]) -> frozenset[str] | None:
    """Kinds of group that all these dumps contain; None if no dump is partial.

    A partial dump has only pending operations, so it lacks groups in which all is complete.
    """
    if not any(dump.partial for dump in crowd):
        return None
    return frozenset.intersection(*(frozenset(map(label, dump.seats)) for dump in crowd))


def _counts(dump: RankDump, known: frozenset[str] | None) -> tuple[tuple[str, int], ...]:
    """Number of operations that a rank called, per kind of group."""
    counts = ((label(group), seat.entered) for group, seat in dump.seats.items())
    return tuple(sorted(one for one in counts if known is None or one[0] in known))
