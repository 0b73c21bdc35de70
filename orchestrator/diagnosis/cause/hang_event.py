"""The diagnosis of a hang as an event. It holds what the decision and a person need, and its size
does not grow with the number of ranks.
"""

from collections.abc import Sequence

from orchestrator.contract.messages.events import EvidenceGathered, HangJudged
from orchestrator.diagnosis.cause.findings import Findings
from orchestrator.diagnosis.hang.analyse import analyse
from orchestrator.diagnosis.hang.report import ranks_words, waiting_words
from orchestrator.diagnosis.hang.verdicts import Diagnosis, HangEvidence, RankFacts
from orchestrator.diagnosis.stacks import python_stacks

SHOWN_STACKS = 16
"""Ranks whose stacks a verdict shows."""
SHOWN_RANKS = 64
SHOWN_MISSING = 8


def judged_from(findings: Findings, attempt: int) -> HangJudged:
    """The verdict from the journal alone, after the loss of the leader that had the dumps."""
    facts: dict[int, RankFacts] = {}
    # The journal keeps states and stacks but no dumps, so this verdict rests on less.
    for part in findings.evidence:
        facts |= facts_of(part)
    missing = [f"{what}: {why}" for part in findings.evidence for what, why in part.missing.items()]
    # No clock is read here: a replay of the journal must give the same event.
    at = findings.evidence[-1].at if findings.evidence else findings.opened_at
    return judgement(HangEvidence(facts=facts), at=at, attempt=attempt, missing=missing)


def judgement(
    scene: HangEvidence,
    *,
    at: float,
    attempt: int,
    missing: Sequence[str] = (),
    took_s: float = 0.0,
) -> HangJudged:
    """`missing`: what evidence is missing and why, the most important first."""
    return judged_as(analyse(scene), scene, at=at, attempt=attempt, missing=missing, took_s=took_s)


def judged_as(
    diagnosis: Diagnosis,
    scene: HangEvidence,
    *,
    at: float,
    attempt: int,
    missing: Sequence[str] = (),
    took_s: float = 0.0,
) -> HangJudged:
    more = len(missing) - SHOWN_MISSING
    lost = [f"missing: {words}" for words in missing[:SHOWN_MISSING]]
    lost += [f"missing: {more} more pieces of evidence, see the traces"] if more > 0 else []
    return HangJudged(
        at=at,
        attempt=attempt,
        verdict=diagnosis.kind,
        cause=diagnosis.cause,
        scope=diagnosis.scope,
        # A verdict about thousands of ranks must not make an event of thousands of entries.
        ranks=diagnosis.ranks[:SHOWN_RANKS],
        hosts=diagnosis.hosts,
        confidence=diagnosis.confidence,
        signs=(*diagnosis.evidence, *_scene_words(scene, diagnosis), *lost),
        waiting=tuple(waiting_words(waiting) for waiting in diagnosis.waiting),
        advice=diagnosis.advice,
        stacks=_telling(scene, diagnosis),
        took_s=took_s,
    )


def _scene_words(scene: HangEvidence, diagnosis: Diagnosis) -> list[str]:
    # Tell a person that the verdict rests on weaker evidence than usual.
    if not scene.dumps:
        return ["no flight recorder was dumped: judged from states, stacks and heartbeats"]
    mute = ranks_words(diagnosis.no_dump) if diagnosis.no_dump else ""
    many = len(scene.dumps)
    held = f"dumps of {many} ranks" if many != 1 else "the dump of 1 rank"
    return [f"{held}{f', none of {mute}' if mute else ''}"]


def _telling(scene: HangEvidence, diagnosis: Diagnosis) -> dict[str, tuple[str, ...]]:
    """Stacks of the culprits, then of one rank for each distinct stack, then of others. A rank that
    gave no stack has an empty one."""
    known = {rank: python_stacks.main_stack(facts.stack) for rank, facts in scene.facts.items()}
    first: dict[tuple[tuple[str, str], ...], int] = {}
    for rank, stack in sorted(known.items()):
        # Most ranks of a hang have the same stack, so one of them stands for all.
        first.setdefault(python_stacks.place(stack), rank)
    asked = [rank for rank, facts in sorted(scene.facts.items()) if facts.asked]
    order = dict.fromkeys([*diagnosis.ranks[:SHOWN_STACKS], *first.values(), *asked])
    # A rank that was never asked has no stack to show, and an empty one would read as "gave no
    # stack".
    shown = [rank for rank in order if rank in scene.facts and scene.facts[rank].asked]
    return {str(rank): scene.facts[rank].stack for rank in sorted(shown[:SHOWN_STACKS])}


def facts_of(part: EvidenceGathered) -> dict[int, RankFacts]:
    """Rank -> its facts. A rank whose stack the storage did not return counts as not asked."""
    ended = {
        int(rank): RankFacts(rank=int(rank), host=part.host, ended=how)
        for rank, how in part.ended.items()
    }
    return ended | {
        found.rank: RankFacts(
            rank=found.rank,
            host=part.host,
            process_state=found.process_state,
            # Its silence is the fault of the storage, so it must not count as a sign against its
            # host.
            asked=found.rank not in part.unread,
            stack=found.stack,
            withheld=found.rank in part.withheld,
            step=found.step,
            phase=found.phase,
            age_s=found.age_s,
            place=found.place,
            still_s=found.still_s,
            starved_s=found.starved_s,
            throttled=found.throttled,
        )
        for found in part.ranks
    }
