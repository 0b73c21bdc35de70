"""Ranks with other work than their peers, for example an evaluator, are not a mismatch."""

from collections.abc import Callable, Mapping, Sequence

import pytest

from orchestrator.diagnosis.hang.analyse import analyse
from orchestrator.diagnosis.hang.verdicts import Diagnosis, HangEvidence, RankFacts
from tests.diagnosis.recorder import (
    IN_ALL_REDUCE,
    IN_LOADER,
    Pg,
    Recorder,
    dumps_of,
    recorders,
)

ALL = Pg("0", "default_pg", range(4))
GLOO_NAMES = "undefined"


def together(ranks: Sequence[Recorder], group: Pg, stuck: int = -1) -> None:
    """All members except `stuck` call an all-reduce. If `stuck` is a member, none completes it."""
    for one in ranks:
        if one.rank in group.members and one.rank != stuck:
            one.call(group, state="started" if stuck in group.members else "completed")


def with_evaluator() -> list[Recorder]:
    """Rank 3 evaluates. It joins only each fifth time, and waits there. Rank 1 is stuck."""
    ranks = recorders(4, gloo=True)
    trainers = Pg("1", GLOO_NAMES, range(3))
    for number in range(18):
        if number % 5 == 0:
            together(ranks, ALL)
        together(ranks, trainers, stuck=1 if number == 17 else -1)
    ranks[3].call(ALL, state="started")
    return ranks


def coordinator() -> list[Recorder]:
    """Rank 0 sometimes has a collective with rank 2 alone, and ranks 1 to 3 have others without it.
    Rank 2 is stuck."""
    ranks = recorders(4, gloo=True)
    for number in range(10):
        together(ranks, ALL)
        if number % 4 == 0:
            together(ranks, Pg("1", GLOO_NAMES, (0, 2)))
        together(ranks, Pg("2", GLOO_NAMES, (1, 2, 3)))
    together(ranks, ALL, stuck=2)
    return ranks


def evaluates_alone() -> list[Recorder]:
    """Ranks 1 to 3 have a collective each fourth time, while rank 0 evaluates. Rank 3 is stuck."""
    ranks = recorders(4, gloo=True)
    for number in range(12):
        together(ranks, ALL)
        if number % 4 == 3:
            together(ranks, Pg("1", GLOO_NAMES, (1, 2, 3)))
    together(ranks, ALL, stuck=3)
    return ranks


def seen(stuck: int) -> Mapping[int, RankFacts]:
    return {
        rank: RankFacts(rank=rank, asked=True, stack=IN_LOADER if rank == stuck else IN_ALL_REDUCE)
        for rank in range(4)
    }


@pytest.mark.parametrize("stacks", [True, False])
@pytest.mark.parametrize(
    ("job", "stuck"), [(with_evaluator, 1), (coordinator, 2), (evaluates_alone, 3)]
)
def test_a_rank_outside_a_group_of_its_peers_did_not_leave_their_path(
    job: Callable[[], list[Recorder]], stuck: int, stacks: bool
) -> None:
    dumps = dumps_of(job())
    facts = seen(stuck) if stacks else {rank: RankFacts(rank=rank) for rank in range(4)}
    found = analyse(HangEvidence(dumps=dumps, facts=facts))
    assert (found.kind, found.ranks) == ("never-entered", (stuck,))


@pytest.mark.parametrize("job", [with_evaluator, coordinator, evaluates_alone])
def test_without_a_dump_of_the_stuck_rank_no_other_rank_is_the_culprit(
    job: Callable[[], list[Recorder]],
) -> None:
    stuck = {with_evaluator: 1, coordinator: 2, evaluates_alone: 3}[job]
    found = analyse(HangEvidence(dumps=dumps_of(job(), (stuck,)), world=4))
    assert (found.ranks, found.hosts) == ((stuck,), ())


def of_nccl(lost: Sequence[int], skips: int | None = None) -> Diagnosis:
    """Dumps that list all members. Rank 7 evaluates. Either rank 3 is stuck in its data loader, or
    the rank in `skips` skips an operation of the trainers and is ahead of them."""
    world = Pg("0", "default_pg", range(8))
    trainers = Pg("1", "trainers", range(7))
    ranks = recorders(8)
    for number in range(16):
        if number % 5 == 0:
            together(ranks, world)
        together(ranks, trainers)
    if skips is None:
        together(ranks[:7], trainers, stuck=3)
        ranks[7].call(world, state="started")
    else:
        together(ranks[:7], trainers, stuck=skips)
        ranks[skips].call(world, state="started")
    facts = {rank: RankFacts(rank=rank, host=f"h{rank // 2}") for rank in range(8)}
    return analyse(HangEvidence(dumps=dumps_of(ranks, lost), facts=facts))


def test_a_peer_without_a_dump_is_not_the_culprit_if_dumps_list_all_members() -> None:
    found = of_nccl(lost=())
    assert (found.kind, found.ranks, found.hosts) == ("never-entered", (3,), ("h1",))
    found = of_nccl(lost=(3,))
    assert (found.kind, found.ranks, found.hosts) == ("never-entered", (3,), ())


def test_a_rank_that_skipped_an_operation_left_the_path_of_its_peers() -> None:
    """While another rank does other work."""
    found = of_nccl(lost=(), skips=5)
    assert (found.kind, found.ranks, found.hosts) == ("skipped", (5,), ())


def of_two_orders(stacks: bool) -> Diagnosis:
    """Rank 1 calls operations of two axes in another order than its peers. That is harmless,
    because all of them complete. Rank 3 is stuck, rank 1 waits for it, and rank 0 waits for rank
    1."""
    tp = [Pg(str(1 + i), "tp", (2 * i, 2 * i + 1)) for i in range(4)]
    dp = [Pg(str(5 + i), "dp", range(i, 8, 2)) for i in range(2)]
    ranks = recorders(8)
    for _ in range(6):
        for one in ranks:
            mine = (tp[one.rank // 2], dp[one.rank % 2])
            for group in reversed(mine) if one.rank == 1 else mine:
                one.call(group)
    for one in ranks:
        if one.rank != 3:
            one.call(dp[one.rank % 2] if one.rank % 2 else tp[one.rank // 2], state="started")
    facts = {
        rank: RankFacts(
            rank=rank,
            host=f"h{rank // 2}",
            asked=stacks,
            stack=() if not stacks else IN_LOADER if rank == 3 else IN_ALL_REDUCE,
        )
        for rank in range(8)
    }
    return analyse(HangEvidence(dumps=dumps_of(ranks), facts=facts))


def test_another_order_of_completed_calls_counts_less_than_another_stack() -> None:
    found = of_two_orders(stacks=True)
    assert (found.kind, found.ranks, found.hosts) == ("never-entered", (3,), ("h1",))
