"""Finds ranks that others wait for and that wait for no other rank."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from orchestrator.diagnosis.hang.evidence_index import SURE, EvidenceIndex, named
from orchestrator.diagnosis.hang.groups import Stuck, is_pipeline
from orchestrator.diagnosis.hang.missing_dumps import MOST_GUESSES, suspects
from orchestrator.diagnosis.hang.report import ranks_wait, ranks_words, spans
from orchestrator.diagnosis.hang.verdicts import Diagnosis

KNOWN = 0.5
GUESSED = 0.45


def never_entered(case: EvidenceIndex, guess: bool = False) -> Diagnosis | None:
    """A rank that did not call an operation in which others wait.

    Args:
        guess: also blame a rank without a dump against which there is no other evidence.
    """
    direct: Counter[int] = Counter()
    for stuck in case.stuck:
        for rank in stuck.missing:
            # Count waiting ranks, not operations: a rank that a large group waits for is listed
            # first.
            direct[rank] += len(stuck.entered)
    for peer in _unanswered(case):
        direct[peer] += 1
    # A rank that waits for others is a victim itself. Follow the graph to ranks that do not wait.
    sources = [rank for rank in direct if rank not in case.waiters]
    dumped = [
        rank for rank in sources if rank in case.scene.dumps and not _may_talk_unseen(case, rank)
    ]
    lost = suspects(case, direct)
    if not dumped and not lost:
        return None
    blamed, signs, confidence = _single_out(case, dumped, lost, direct)
    # A guess is left to the end of `analyse`, where all better evidence was tried. With partial
    # dumps a rank may be missing only because its operations are complete, so no guess is made.
    if not blamed or (confidence < KNOWN and not (guess and not case.partial)):
        return None
    # An uncertain verdict excludes no host anyway, so it needs no doubts.
    doubts = tuple(_doubts(case, blamed, dumped)) if confidence > KNOWN else ()
    signs, confidence = (*signs, *doubts), KNOWN if doubts else confidence
    ops = [s for s in case.stuck if {*s.missing, *s.unknown} & set(blamed)]
    ops.sort(key=lambda s: (-len(s.entered), s.group.id))
    what = f"{ranks_words(blamed)} did not call the operation in which the others wait"
    where = f": {named(ops[0])}" if ops else ""
    return case.blame("never-entered", blamed, confidence, what + where, signs, ops)


def elsewhere(case: EvidenceIndex) -> Diagnosis | None:
    """The verdict `never_entered` if it is certain: one rank, and its dump, stack or state agree.

    It is checked before weaker signs of other ranks.
    """
    found = never_entered(case)
    # A missing dump leaves a doubt, so a rank that took another path is named before such a rank.
    if found is None or found.confidence < SURE or found.ranks[0] not in case.scene.dumps:
        return None
    speaks = len(found.ranks) == 1 and case.signs_against(found.ranks[0])[1] > 0
    return found if speaks else None


def _may_talk_unseen(case: EvidenceIndex, rank: int) -> bool:
    """True if the rank may wait in a pipeline send or receive that is not recorded.

    gloo's recorder does not record them, so only a stack could show it.
    """
    # There is other evidence about it, so it can be judged without its sends and receives.
    if rank in case.stacks or rank in case.odd_states or rank in case.mute:
        return False
    on_gloo = not any(group.members for group in case.scene.dumps[rank].seats)
    kinds = [*(group.id.desc for group in case.groups), *case.scene.axes]
    return on_gloo and any(map(is_pipeline, kinds))


def _unanswered(case: EvidenceIndex) -> Iterable[int]:
    """Peers of a pending send or receive that did not call the matching receive or send."""
    dumps = case.scene.dumps
    parts = Counter(
        (rank, talk.peer, talk.sends) for rank, dump in dumps.items() for talk in dump.talks
    )
    for (rank, peer, sends), count in parts.items():
        # A peer without a dump may have called it: `suspects` weighs these ranks.
        if peer in dumps and parts.get((peer, rank, not sends), 0) < count:
            yield peer


def _single_out(
    case: EvidenceIndex, dumped: Sequence[int], lost: Sequence[int], direct: Counter[int]
) -> tuple[tuple[int, ...], tuple[str, ...], float]:
    """The candidates with the strongest evidence, that evidence, and the confidence (0 to 1).

    A dump proves that its rank waits for no other. Without a dump this is a guess.
    """
    weighed = {rank: case.signs_against(rank) for rank in dumped}
    for rank in lost:
        # A stack in a collective does not clear a rank without a dump: it may wait in another
        # operation than the ranks that wait for it.
        signs, weight = case.signs_against(rank)
        weighed[rank] = (signs if weight else (), max(0, weight))
    # At equal weight a dump decides, because it proves that its rank waits for no other.
    order = {rank: (weighed[rank][1], rank in set(dumped)) for rank in weighed}
    best = max(order.values())
    heaviest = [rank for rank in weighed if order[rank] == best]
    weight, has_dump = best
    # Even the best candidate waits for others, by its stack. Then the culprit is another rank.
    if weight < 0:
        return (), (), 0.0
    first = heaviest[0]
    held = (
        f"its dump shows no pending operation; {ranks_wait(direct[first])} for it"
        if has_dump
        else f"it has no dump; {ranks_wait(direct[first])} in operations that it may not have"
        " called"
    )
    signs = (held, *weighed[first][0])
    if len(heaviest) == 1:
        sure = (0.92, 0.95, 0.98) if has_dump else (GUESSED, 0.8, 0.97)
        return (first,), signs, sure[weight]
    hosts = {case.scene.host(rank) for rank in heaviest}
    # A broken host stops all of its ranks at once. Without any sign against them, ranks of one host
    # may be the candidates by chance.
    if len(hosts) == 1 and None not in hosts and weight > 0:
        return tuple(sorted(heaviest)), (*signs, f"all of these ranks are on {hosts.pop()}"), SURE
    by_waiters = sorted(heaviest, key=lambda rank: (-direct[rank], rank))
    if has_dump:
        why = f"others wait for {len(heaviest)} ranks, which wait for no other rank"
        return tuple(by_waiters), (why,), KNOWN
    # A long list of possible culprits tells a user no more than "not known".
    if len(heaviest) > MOST_GUESSES:
        return (), (), 0.0
    return tuple(by_waiters), (f"one of ranks {spans(heaviest)}, which have no dump",), 0.3


def _doubts(case: EvidenceIndex, blamed: Sequence[int], dumped: Sequence[int]) -> Iterator[str]:
    """Other possible culprits. If there is one, no host is excluded."""
    if blamed[0] in case.scene.dumps:
        for rank in sorted({rank for stuck in case.stuck for rank in stuck.unknown}):
            signs, weight = case.signs_against(rank)
            # Weak signs are common in a healthy rank, such as a late rank on a busy host.
            if weight > 1:
                yield f"but rank {rank} has no dump and may be missing too: {signs[0]}"
        return
    for rank in sorted(dumped):
        # A rank whose stack is in torch.distributed waits for others, so it is no other possible
        # culprit.
        if case.signs_against(rank)[1] >= 0:
            yield f"but the dump of rank {rank} shows that it is missing and waits for no rank"


def left_inside(case: EvidenceIndex) -> Diagnosis | None:
    for stuck in case.stuck:
        # A missing member explains by itself why the others wait inside.
        if stuck.missing or stuck.unknown or not stuck.out:
            continue
        if any(case.scene.dumps[rank].first != stuck.group.id for rank in stuck.entered):
            continue  # a rank that entered it waits first in an earlier operation
        # If most members are still inside, the few that are out finished their part early, as the
        # source of a broadcast does.
        if len(stuck.entered) < len(stuck.out) or len(stuck.entered) == 1:
            ranks = tuple(sorted(stuck.entered))
            what = f"{ranks_words(ranks)} did not complete {named(stuck)}"
            signs = (f"it is complete on {_others(len(stuck.out))}",)
            sure = SURE if len(ranks) == 1 and len(stuck.out) > 1 else 0.6
            return case.blame("left-inside", ranks, sure, what, signs, [stuck])
    # All members called the operation, but on a minority the device did not start it: the device is
    # busy or failed.
    for stuck in case.stuck:
        late = [rank for rank, call in stuck.entered.items() if not call.started]
        if stuck.missing or stuck.unknown or not late or 2 * len(late) >= len(stuck.entered):
            continue
        ranks = tuple(sorted(late))
        what = f"the device of {ranks_words(ranks)} did not start {named(stuck)}"
        signs = (f"it runs on {_others(len(stuck.entered) - len(late))}",)
        # A device runs the operations of several groups one after another. One that runs another
        # group's operation starts this one later, and is not at fault.
        if all(not _waits_elsewhere(case, rank, stuck) for rank in ranks):
            return case.blame("left-inside", ranks, 0.8, what, signs, [stuck])
    return None


def _others(members: int) -> str:
    return f"the {members} other members" if members > 1 else "the other member"


def _waits_elsewhere(case: EvidenceIndex, rank: int, stuck: Stuck) -> bool:
    return any(
        other is not stuck and rank in other.entered and other.entered[rank].started
        for other in case.stuck
    )
