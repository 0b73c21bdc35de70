"""Reduced dumps as text: the leader reads the same as it would from the original dump."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.diagnosis.dumps.dump import (
    Call,
    GroupId,
    GroupProgress,
    Op,
    PeerCall,
    RankDump,
    Unreadable,
    condense,
    parse,
)
from orchestrator.diagnosis.dumps.dump_summary import _members, from_text, runs, to_text
from tests.e2e.job import ROOT

FLIGHT = ROOT / "tests" / "captured" / "flight"
REDUCE = Op("all_reduce", "4", "4", "Float")
WORLD = GroupId("0", "default_pg", tuple(range(16_384)))
DATA = GroupId("7", "mesh_dp_shard", tuple(range(3, 16_384, 8)))
NAMELESS = GroupId("9", "mesh_pp", ())


@pytest.mark.parametrize("path", sorted(FLIGHT.iterdir()), ids=lambda path: path.name)
def test_a_dump_survives_a_round_trip(path: object) -> None:
    dump = condense(3, parse(path.read_bytes()))  # type: ignore[attr-defined]
    assert dump.seats
    assert from_text(to_text(dump)) == dump


def test_each_dump_of_16384_ranks_takes_few_bytes() -> None:
    seat = GroupProgress(40, 39, tuple(Call(seq, REDUCE, True) for seq in range(36, 41)))
    talk = PeerCall(NAMELESS, True, 12)
    dump = RankDump(5, {WORLD: seat, DATA: seat}, (talk,), WORLD, DATA)
    text = to_text(dump)
    assert from_text(text) == dump
    assert len(text) < 600


@given(st.lists(st.integers(0, 200), unique=True).map(sorted))
def test_members_written_as_ranges_are_the_same_members(members: list[int]) -> None:
    assert _members(runs(members)) == tuple(members)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"rank": 1}', '{"rank":0,"groups":[["a"]]}'])
def test_other_text_is_not_a_reduced_dump(text: str) -> None:
    with pytest.raises(Unreadable):
        from_text(text)
