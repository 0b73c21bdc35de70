"""Whose operation did not fit, once all ranks have ended over it.

gloo ends a rank that is sent more than it expects, at once and without a dump. Its peers see a
connection break, and write down what they had called. So either dumps show who called something
else, or they all agree, and it was the one that cannot say any more.
"""

from collections.abc import Collection
from dataclasses import replace

from orchestrator.diagnosis.hang.evidence_index import SHOWN, SURE, Case, named
from orchestrator.diagnosis.hang.groups import Stuck, calls_of_kin, ended_in
from orchestrator.diagnosis.hang.mismatch import PATHS, mismatch
from orchestrator.diagnosis.hang.unattributed import not_known
from orchestrator.diagnosis.hang.verdicts import Diagnosis, Scene

CLASS = "collective-mismatch"
"""Of the failure of a rank that was ended over sizes."""


def differing(scene: Scene, ended: Collection[int]) -> Diagnosis:
    """The verdict on ranks that are gone, of which those in `ended` were ended over sizes."""
    case = Case(scene)
    last = list(ended_in(case.groups, scene.dumps))
    found = mismatch(case, last) or _the_one_that_is_mute(case, last, ended)
    if found is None:
        cause = "what the ranks had called does not tell them apart"
        found = replace(not_known(case), cause=cause, evidence=(), advice=PATHS)
    return replace(found, no_dump=case.no_dump)


def _the_one_that_is_mute(
    case: Case, last: list[Stuck], ended: Collection[int]
) -> Diagnosis | None:
    """All that is known fits, and one alone that was ended over it has no dump."""
    mute = [rank for rank in ended if rank not in case.scene.dumps]
    if len(mute) != 1:
        return None
    (rank,) = mute
    with_it = [stuck for stuck in last if rank in stuck.group.members]
    if not with_it or any(stuck.unknown != (rank,) for stuck in with_it):
        return None  # another one that cannot say may be it as well
    telling = [stuck for stuck in with_it if _are_right(case, stuck)]
    if not telling:
        return None
    stuck = max(telling, key=lambda one: len(one.entered))
    peers = len(stuck.entered)
    return Diagnosis(
        kind="mismatch",
        scope="user",
        ranks=(rank,),
        hosts=(),
        confidence=SURE,
        cause=f"rank {rank} called another operation than its peers as {named(stuck)}",
        evidence=(
            f"rank {rank} was ended because sizes did not fit, and wrote no dump",
            f"what its {peers} peers called fits: {stuck.op}"
            if peers > 1
            else f"its one peer called what other groups of its axis called: {stuck.op}",
        ),
        waiting=tuple(case.waiting(one) for one in with_it[:SHOWN]),
        advice=PATHS,
    )


def _are_right(case: Case, stuck: Stuck) -> bool:
    """Two that agree are; one alone may be the odd one itself, unless its like called the same."""
    if len(stuck.entered) > 1:
        return True
    like = calls_of_kin(stuck, case.kin)
    return bool(stuck.entered and like) and all(stuck.op.fits(op) for op in like)
