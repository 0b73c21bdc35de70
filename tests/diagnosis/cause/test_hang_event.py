"""The verdict on a hang if blocked storage hides a part of the evidence."""

import pytest

from orchestrator.contract.messages.events import EvidenceGathered, RankEvidence
from orchestrator.diagnosis.cause.hang_event import facts_of
from orchestrator.diagnosis.hang.analyse import analyse
from orchestrator.diagnosis.hang.verdicts import Diagnosis, HangEvidence, RankFacts
from tests.diagnosis.recorder import IN_ALL_REDUCE, IN_LOADER, Pg, dumps_of, recorders

WORLD, PER_HOST = 8, 2
ALL = Pg("0", "default_pg", range(WORLD))
AWAY = 3


def evidence_of(host: int, *, mute: bool, unread: bool, state: str) -> EvidenceGathered:
    ranks = range(PER_HOST * host, PER_HOST * (host + 1))
    return EvidenceGathered(
        at=9.0,
        attempt=1,
        host=f"h{host}",
        ranks=tuple(
            RankEvidence(
                rank=rank,
                pid=100 + rank,
                process_state=state if mute else "S",
                step=29,
                phase="train",
                age_s=9.0,
                stack=() if mute else IN_LOADER if rank == AWAY else IN_ALL_REDUCE,
            )
            for rank in ranks
        ),
        unread=tuple(ranks) if unread else (),
    )


def verdict(lost: tuple[int, ...], *, unread: bool, state: str = "S") -> Diagnosis:
    """The verdict on a hang in which rank 3 did not call the operation in which the others wait.
    Ranks 6 and 7 have no stack. Ranks in `lost` have no dump.
    """
    ranks = recorders(WORLD)
    for number in range(5):
        for one in ranks:
            if number < 4 or one.rank != AWAY:
                one.call(ALL, state="completed" if number < 4 else "started")
    facts: dict[int, RankFacts] = {}
    for host in range(WORLD // PER_HOST):
        mute = host == 3
        facts |= facts_of(evidence_of(host, mute=mute, unread=mute and unread, state=state))
    return analyse(HangEvidence(dumps=dumps_of(ranks, lost), facts=facts, world=WORLD))


@pytest.mark.parametrize("state", ["S", "D"])
def test_a_host_whose_storage_blocked_the_evidence_is_not_excluded(state: str) -> None:
    """A rank that writes its stack to such storage may wait for it in the kernel."""
    found = verdict((6, 7), unread=True, state=state)
    assert (found.ranks, found.hosts) == ((3,), ("h1",))
    found = verdict((3, 6, 7), unread=True, state=state)
    assert (found.ranks, found.hosts) == ((3,), ())


def test_a_stopped_rank_is_found_even_if_its_storage_is_blocked() -> None:
    found = verdict((3, 6, 7), unread=True, state="T")
    assert (found.ranks, found.hosts) == ((6, 7), ("h3",))


def test_a_host_with_silent_ranks_and_working_storage_is_excluded() -> None:
    found = verdict((3, 6, 7), unread=False)
    assert (found.ranks, found.hosts) == ((6, 7), ("h3",))


def test_the_verdict_says_which_rank_had_ended_and_does_not_blame_it() -> None:
    alive = evidence_of(0, mute=False, unread=False, state="S")
    gone = EvidenceGathered(
        at=9.0, attempt=1, host="h1", ranks=(), ended={"2": "exit code 0", "3": "exit code 0"}
    )
    found = analyse(HangEvidence(facts=facts_of(alive) | facts_of(gone), world=4))
    assert (found.ranks, found.hosts) == ((), ())
    assert found.cause.startswith("ranks 2-3 had ended (exit code 0); ")


def test_the_host_of_a_rank_that_returned_is_not_excluded() -> None:
    """All others wait for it in a recorded operation, and its dump shows that it did not call."""
    ranks = recorders(WORLD)
    for number in range(5):
        for one in ranks:
            if number < 4 or one.rank != AWAY:
                one.call(ALL, state="completed" if number < 4 else "started")
    facts: dict[int, RankFacts] = {}
    for host in range(WORLD // PER_HOST):
        facts |= facts_of(evidence_of(host, mute=False, unread=False, state="S"))
    running = analyse(HangEvidence(dumps=dumps_of(ranks, ()), facts=facts, world=WORLD))
    assert (running.ranks, running.hosts) == ((AWAY,), ("h1",))
    facts[AWAY] = RankFacts(rank=AWAY, host="h1", ended="exit code 0")
    found = analyse(HangEvidence(dumps=dumps_of(ranks, ()), facts=facts, world=WORLD))
    assert (found.ranks, found.hosts) == ((AWAY,), ())
    assert "rank 3 had ended (exit code 0)" in found.evidence
