"""The wait graph: ranks that others wait for and that wait for no rank themselves."""

from collections.abc import Sequence
from typing import Any

import pytest

from orchestrator.diagnosis.hang.analyse import analyse
from orchestrator.diagnosis.hang.evidence_index import SURE
from orchestrator.diagnosis.hang.report import waiting_words
from orchestrator.diagnosis.hang.verdicts import Diagnosis, HangEvidence, RankFacts, Waiting
from orchestrator.diagnosis.hang.wait_graph import KNOWN
from tests.diagnosis.recorder import (
    IN_ALL_REDUCE,
    IN_BACKWARD,
    IN_LOADER,
    Pg,
    dumps_of,
    recorders,
)

WORLD = 8
ALL = Pg("0", "default_pg", range(WORLD))
AWAY = 3
"""A rank that did not call the last operation, because it is in its data loader."""


def verdict(of_rank_6: dict[str, Any], lost: Sequence[int] = (6,)) -> Diagnosis:
    """The verdict if all ranks except 3 wait in an all-reduce. Ranks in `lost` have no dump."""
    ranks = recorders(WORLD)
    for number in range(5):
        for one in ranks:
            if number < 4 or one.rank != AWAY:
                one.call(ALL, state="completed" if number < 4 else "started")
    facts = {rank: seen(rank) for rank in range(WORLD)}
    facts[6] = seen(6, **of_rank_6)
    return analyse(HangEvidence(dumps=dumps_of(ranks, lost), facts=facts, world=WORLD))


def seen(rank: int, **more: Any) -> RankFacts:
    usual = IN_LOADER if rank == AWAY else IN_ALL_REDUCE
    known = {"process_state": "S", "asked": True, "stack": usual, **more}
    return RankFacts(rank=rank, host=f"h{rank // 2}", **known)


def test_a_dump_of_a_rank_that_never_entered_is_stronger_than_no_dump() -> None:
    """Rank 6 waits too. It was in the kernel by chance when its state was read."""
    found = verdict({"process_state": "D"})
    assert (found.kind, found.ranks, found.hosts) == ("never-entered", (3,), ("h1",))
    assert found.confidence >= SURE


@pytest.mark.parametrize(
    ("of_rank_6", "sign"),
    [
        ({"stack": ()}, "gave no stack"),
        ({"stack": IN_BACKWARD, "withheld": True}, "GIL is held"),
        ({"stack": (), "process_state": "T"}, "state T"),
    ],
)
def test_with_another_possible_culprit_no_host_is_excluded(
    of_rank_6: dict[str, Any], sign: str
) -> None:
    found = verdict(of_rank_6)
    assert (found.kind, found.ranks[0], found.hosts) == ("never-entered", 3, ())
    assert found.confidence <= KNOWN
    assert any("rank 6" in words and sign in words for words in found.evidence)


def test_a_kernel_wait_of_a_rank_that_gave_a_stack_is_not_evidence() -> None:
    """The rank is in an all-reduce like those with a dump. The other rank is not."""
    found = verdict({"process_state": "D"}, lost=(3, 6))
    assert (found.kind, found.ranks, found.hosts) == ("never-entered", (3,), ())
    found = verdict({"process_state": "D"}, lost=range(WORLD))
    assert (found.kind, found.ranks, found.hosts) == ("alone", (3,), ())


def test_a_kernel_wait_of_a_rank_without_a_stack_explains_its_missing_dump() -> None:
    ranks = recorders(WORLD)
    for one in ranks:
        one.call(ALL, state="started")
    facts = {rank: seen(rank, stack=IN_ALL_REDUCE) for rank in range(WORLD)}
    facts[6] = seen(6, process_state="D", stack=())
    found = analyse(HangEvidence(dumps=dumps_of(ranks, (6,)), facts=facts, world=WORLD))
    assert (found.kind, found.ranks, found.hosts) == ("stopped", (6,), ("h3",))
    assert found.cause.startswith(
        "rank 6 is in an uninterruptible wait in the kernel (state D); it did not call"
    )


TP = [Pg(str(10 + i), "TENSOR_MODEL_PARALLEL_GROUP", range(4 * i, 4 * i + 4)) for i in range(4)]
DP = [Pg(str(20 + i), "DATA_PARALLEL_GROUP", range(i, 16, 4)) for i in range(4)]


def of_two_axes(lost: Sequence[int], queued: Sequence[int] = (1, 5, 9)) -> Diagnosis:
    """Rank 13 hangs before the all-reduce of gradients, in which its peers wait. The peers have
    also queued the next broadcast, which their neighbours on the other axis have completed."""
    ranks = recorders(16)
    for one in ranks:
        for step in range(4):
            tp, dp = TP[one.rank // 4], DP[one.rank % 4]
            one.call(tp, "broadcast")
            one.call(tp)
            if one.rank == 13 and step == 3:
                break
            if step < 3 or one.rank not in queued:
                one.call(dp, size=64)
            else:
                one.call(dp, size=64, state="started")
        if one.rank != 13:
            waits = one.rank // 4 == 3
            state = "scheduled" if one.rank in queued else "started" if waits else "completed"
            one.call(TP[one.rank // 4], "broadcast", state)
    facts = {rank: RankFacts(rank=rank, host=f"h{rank // 2}") for rank in range(16)}
    return analyse(HangEvidence(dumps=dumps_of(ranks, lost), facts=facts, world=16))


def test_a_rank_waits_in_its_oldest_pending_operation() -> None:
    found = of_two_axes(lost=())
    assert (found.kind, found.ranks, found.hosts) == ("never-entered", (13,), ("h6",))
    found = of_two_axes(lost=(13,))
    assert (found.kind, found.ranks, found.hosts) == ("never-entered", (13,), ())
    assert of_two_axes(lost=(12, 13)).hosts == ()


def test_the_only_rank_that_did_not_complete_its_first_call_is_named() -> None:
    ranks = recorders(WORLD)
    for one in ranks:
        one.call(ALL)
        one.call(ALL, state="started" if one.rank == 5 else "completed")
    facts = {rank: RankFacts(rank=rank, host=f"h{rank // 2}") for rank in range(WORLD)}
    found = analyse(HangEvidence(dumps=dumps_of(ranks), facts=facts, world=WORLD))
    assert (found.kind, found.ranks, found.hosts) == ("left-inside", (5,), ("h2",))


@pytest.mark.parametrize("stopped", [0, 1])
@pytest.mark.parametrize("called", [False, True])
@pytest.mark.parametrize(
    ("state", "other", "sure"),
    [("T", "S", True), ("S", "S", False), ("t", "S", False), ("T", "t", False)],
)
def test_of_two_ranks_the_one_that_a_signal_stopped_is_named(
    stopped: int, called: bool, state: str, other: str, sure: bool
) -> None:
    """It may have called the operation that is complete on the other rank. Without the state the
    dumps of two ranks do not tell which of them failed."""
    world = Pg("0", "default_pg", range(2))
    ranks = recorders(2)
    for one in ranks:
        one.call(world)
        if one.rank != stopped:
            one.call(world, state="completed" if called else "started")
        elif called:
            one.call(world, state="started")
    facts = {
        rank: RankFacts(rank=rank, host="h0", process_state=state if rank == stopped else other)
        for rank in range(2)
    }
    found = analyse(HangEvidence(dumps=dumps_of(ranks), facts=facts, world=2))
    assert (found.ranks, found.hosts) == ((stopped,), ("h0",)) or not sure
    if called:  # otherwise the dumps alone are enough
        assert (found.confidence >= SURE) == sure


PAIR = Pg("1", "undefined", (0, 1))


def crossing(stack: tuple[str, ...] = ()) -> HangEvidence:
    """Rank 1 calls an operation of a pair once more than rank 0, which is in one of all ranks."""
    ranks = recorders(4)
    everyone = Pg("0", "default_pg", range(4))
    for one in ranks:
        one.call(everyone)
        if one.rank < 2:
            one.call(PAIR)
        one.call(PAIR if one.rank == 1 else everyone, state="started")
    facts = {rank: RankFacts(rank=rank, host=f"h{rank}", stack=stack) for rank in (0,)}
    return HangEvidence(dumps=dumps_of(ranks, ()), facts=facts, world=4)


def test_two_ranks_that_wait_for_each_other_show_a_wrong_program() -> None:
    found = analyse(crossing())
    assert (found.kind, found.scope, found.ranks, found.hosts) == ("mismatch", "user", (), ())
    assert found.cause.startswith("ranks 0 and 1 wait for each other: rank 0 in operation 2 of ")
    assert [one.group for one in found.waiting] == ["0", "1"]
    # An operation that rank 0 called asynchronously is not what it waits for.
    assert "wait for each other" not in analyse(crossing(IN_LOADER)).cause


def test_members_that_no_dump_names_are_not_counted() -> None:
    waiting = Waiting(
        group="3",
        desc="undefined",
        seq=1,
        op="all_reduce",
        size=1,
        entered=(0,),
        missing=(),
        unknown=(),
        open=True,
    )
    assert waiting_words(waiting).endswith("; 1 of an unknown number of ranks entered it")
