"""Finds the rank that called a mismatched collective, after all ranks have ended.

gloo aborts a rank that receives more bytes than it expects, at once and without a dump. Its peers
see a broken connection and write dumps. So either the dumps show which rank called another
operation, or all dumps agree and the culprit is the one rank without a dump.
"""

from collections.abc import Collection

from msgspec.structs import replace

from orchestrator.diagnosis.hang.evidence_index import SHOWN, SURE, EvidenceIndex, named
from orchestrator.diagnosis.hang.groups import Stuck, calls_of_kin, ended_in
from orchestrator.diagnosis.hang.mismatch import PATHS, mismatch
from orchestrator.diagnosis.hang.unattributed import not_known
from orchestrator.diagnosis.hang.verdicts import Diagnosis, HangEvidence

CLASS = "collective-mismatch"
"""Failure class of a rank that was aborted because sizes did not match."""


def differing(scene: HangEvidence, ended: Collection[int]) -> Diagnosis:
    """The verdict after the ranks in `ended` were aborted because sizes did not match."""
    case = EvidenceIndex(scene)
    last = list(ended_in(case.groups, scene.dumps))
    found = mismatch(case, last) or _only_rank_without_dump(case, last, ended)
    if found is None:
        cause = "the operations that the ranks called do not show which rank is wrong"
        found = replace(not_known(case), cause=cause, evidence=(), advice=PATHS)
    return replace(found, no_dump=case.no_dump)


def _only_rank_without_dump(
    case: EvidenceIndex, last: list[Stuck], ended: Collection[int]
) -> Diagnosis | None:
    """The verdict if all dumps agree and exactly one aborted rank has no dump."""
    mute = [rank for rank in ended if rank not in case.scene.dumps]
    # With no such rank all dumps are there and agree. With several, it is open which one is wrong.
    if len(mute) != 1:
        return None
    (rank,) = mute
    with_it = [stuck for stuck in last if rank in stuck.group.members]
    if not with_it or any(stuck.unknown != (rank,) for stuck in with_it):
        return None  # a second rank without a dump could be the culprit too
    telling = [stuck for stuck in with_it if _peers_are_right(case, stuck)]
    if not telling:
        return None
    # The operation with the most agreeing peers is the strongest evidence.
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
            f"rank {rank} was aborted because sizes did not match, and wrote no dump",
            f"its {peers} peers called the same: {stuck.op}"
            if peers > 1
            else f"its only peer called the same as other groups of its axis: {stuck.op}",
        ),
        waiting=tuple(case.waiting(one) for one in with_it[:SHOWN]),
        advice=PATHS,
    )


def _peers_are_right(case: EvidenceIndex, stuck: Stuck) -> bool:
    """Two peers that agree are right. A single peer is right if other groups called the same."""
    if len(stuck.entered) > 1:
        return True
    like = calls_of_kin(stuck, case.kin)
    return bool(stuck.entered and like) and all(stuck.op.fits(op) for op in like)
