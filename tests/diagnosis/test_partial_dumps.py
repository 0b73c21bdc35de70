"""Dumps with pending operations only, as NCCL's recorder writes them with `onlyActive`. They do not
show completed operations, so less is known. No healthy rank may be named because of that."""

from typing import Any

import pytest
from msgspec.structs import replace

from orchestrator.diagnosis.dumps.dump import RankDump, condense
from orchestrator.diagnosis.dumps.dump_summary import from_text, to_text
from orchestrator.diagnosis.hang.analyse import analyse
from orchestrator.diagnosis.hang.verdicts import Diagnosis, HangEvidence
from tests.diagnosis.recorder import Pg, Recorder, recorders
from tests.diagnosis.simulated_hang import (
    FAULTS,
    JUDGED,
    STOPS,
    Fault,
    SimulatedHang,
    active_only,
    random_hang,
)

ALL: tuple[Fault, ...] = (*FAULTS, "network")


def judged(
    seed: int, *, lost: float, evaluator: bool, stacks: bool
) -> tuple[SimulatedHang, Diagnosis]:
    """Analyse a hang on NCCL, where each group has its own stream."""
    fault = ALL[seed % len(ALL)]
    found = active_only(random_hang(seed, fault, lost, evaluator, streams=True))
    scene = found.scene if stacks else replace(found.scene, facts={})
    return found, analyse(scene)


@pytest.mark.parametrize("lost", [0.0, 0.25])
@pytest.mark.parametrize("evaluator", [False, True])
@pytest.mark.parametrize("stacks", [False, True])
def test_no_healthy_rank_and_no_healthy_host_is_named(
    lost: float, evaluator: bool, stacks: bool
) -> None:
    """If two ranks called mismatched operations and nothing shows which is right, both are
    named."""
    named = 0
    for seed in JUDGED[:90]:
        found, verdict = judged(seed, lost=lost, evaluator=evaluator, stacks=stacks)
        if not any(dump.partial for dump in found.scene.dumps.values()):
            continue
        if verdict.ranks:
            named += 1
            assert found.culprit in verdict.ranks, (seed, found.fault, verdict)
            assert len(verdict.ranks) == 1 or verdict.kind == "mismatch", (seed, verdict)
        if verdict.hosts:
            assert found.culprit is not None
            assert verdict.hosts == (found.scene.host(found.culprit),)
    assert named > 15


def test_a_stopped_rank_is_always_named_from_partial_dumps() -> None:
    for seed in JUDGED[:40]:
        fault = STOPS[seed % len(STOPS)]
        found = active_only(random_hang(seed, fault, streams=True))
        assert analyse(found.scene).ranks == (found.culprit,), (seed, fault)


def pending_only(one: Recorder) -> RankDump:
    raw = one.dump()
    left = [entry for entry in raw["entries"] if entry["state"] != "completed"]
    return condense(one.rank, {**raw, "entries": left})


def one_is_late() -> list[Recorder]:
    """Rank 3 stops calling. Rank 2 waits for it in their group, between two calls of all ranks.
    Ranks 0 and 1 have completed the same call in their own group."""
    world, sides = (
        Pg("0", "default_pg", range(4)),
        (Pg("1", "side", (0, 1)), Pg("2", "side", (2, 3))),
    )
    ranks = recorders(4)
    for one in ranks:
        side = sides[one.rank // 2]
        for _ in range(3):
            one.call(world)
            one.call(side)
        if one.rank != 3:
            one.call(world, state="scheduled")
            one.call(side, state="completed" if one.rank < 2 else "scheduled")
            one.call(world, state="scheduled")
    return ranks


def test_a_skipped_call_is_not_another_path_through_the_program() -> None:
    """Only the dump of rank 2 has the call between the calls of all ranks."""
    dumps = {one.rank: pending_only(one) for one in one_is_late()}
    assert [len(dumps[rank].paths) for rank in range(4)] == [2, 2, 1, 0]
    without_the_culprit = {rank: dumps[rank] for rank in (0, 1, 2)}
    assert analyse(HangEvidence(dumps=dumps)).ranks == (3,)
    assert 2 not in analyse(HangEvidence(dumps=without_the_culprit, world=4)).ranks


def test_operations_before_the_oldest_pending_one_are_complete() -> None:
    ranks = one_is_late()
    behind, ahead = pending_only(ranks[0]), pending_only(ranks[2])
    (world,) = behind.seats.values()
    assert (world.done, world.entered) == (3, 5)
    assert [call.seq for call in world.pending] == [4, 5]
    assert {seat.done for seat in ahead.seats.values()} == {3}


def test_idle_ranks_are_all_named_and_no_host_is_excluded() -> None:
    world = Pg("0", "default_pg", range(8))
    ranks = recorders(8)
    for one in ranks:
        for _ in range(5):
            one.call(world)
        if one.rank not in (2, 6):
            one.call(world, state="scheduled")
    verdict = analyse(HangEvidence(dumps={one.rank: pending_only(one) for one in ranks}))
    assert (verdict.kind, verdict.ranks, verdict.hosts) == ("never-entered", (2, 6), ())


def test_the_source_of_a_broadcast_may_have_passed_it() -> None:
    """Ranks 1 to 3 wait in a broadcast of rank 0, which waits in the next operation. The dump does
    not show whether rank 0 skipped the broadcast or has sent its data."""
    world = Pg("0", "default_pg", range(4))
    side = Pg("1", "side", range(4))
    ranks = recorders(4)
    for one in ranks:
        one.call(world)
        one.call(world, op="broadcast", state="completed" if one.rank == 0 else "scheduled")
    ranks[0].call(side, state="scheduled")
    verdict = analyse(HangEvidence(dumps={one.rank: pending_only(one) for one in ranks}))
    assert 0 not in verdict.ranks


@pytest.mark.parametrize("number", [3, "3"])
def test_a_dump_without_entries_of_an_active_rank_is_partial(number: Any) -> None:
    """In JSON, torch writes the numbers of `pg_status` as strings."""
    status = {"0": {"last_enqueued_collective": number, "last_completed_collective": number}}
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}}
    empty = {"version": "2.10", "pg_config": config, "pg_status": status, "entries": []}
    assert condense(0, empty).partial
    assert not condense(0, {**empty, "pg_status": {}}).partial


def test_the_summary_keeps_that_a_dump_is_partial() -> None:
    dump = pending_only(one_is_late()[0])
    assert dump.partial
    assert from_text(to_text(dump)) == dump
