"""The rank whose operation did not match, from dumps that ranks wrote at exit on gloo."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from orchestrator.contract.mesh import Mesh
from orchestrator.diagnosis.dumps.dump import condense
from orchestrator.diagnosis.dumps.group_names import axes_of
from orchestrator.diagnosis.hang.evidence_index import SURE
from orchestrator.diagnosis.hang.post_mortem import differing
from orchestrator.diagnosis.hang.verdicts import Diagnosis, HangEvidence

ALL = ("0", "default_pg")
USUAL, OTHER = 12, 6


def call(group: tuple[str, str], seq: int, numel: int, over: bool = True) -> dict[str, Any]:
    return {
        "pg_id": 0,
        "process_group": group,
        "collective_seq_id": seq,
        "p2p_seq_id": 0,
        "profiling_name": "gloo:all_reduce",
        "input_sizes": [[numel]],
        "input_dtypes": ["Double"],
        "output_sizes": [[numel]],
        "output_dtypes": ["Double"],
        "state": "scheduled",
        "retired": over,
        "is_p2p": False,
    }


def verdict(
    calls: Mapping[int, Sequence[dict[str, Any]]], ended: set[int], mesh: Mesh | None = None
) -> Diagnosis:
    """The verdict for four ranks. The ranks in `calls` wrote a dump."""
    dumps = {rank: condense(rank, {"entries": list(made)}) for rank, made in calls.items()}
    axes = {} if mesh is None else axes_of(mesh)
    return differing(HangEvidence(dumps=dumps, world=4, axes=axes), ended)


def steps(last: int, over: bool = True) -> list[dict[str, Any]]:
    return [*(call(ALL, seq, USUAL) for seq in range(1, 9)), call(ALL, 9, last, over)]


@pytest.mark.parametrize("over", [True, False], ids=["retired", "pending"])
def test_a_rank_without_a_dump_is_found_by_peers_that_agree(over: bool) -> None:
    """Shortly after an operation failed, gloo marks it as retired."""
    found = verdict({0: steps(USUAL, over), 1: steps(USUAL), 3: steps(USUAL, over)}, {2})
    assert (found.kind, found.scope, found.ranks, found.hosts) == ("mismatch", "user", (2,), ())
    assert found.confidence >= SURE
    assert "rank 2 called another operation than its peers as operation 9" in found.cause


def test_a_rank_aborted_because_of_a_peer_is_not_the_culprit() -> None:
    found = verdict({0: steps(USUAL), 2: steps(2 * USUAL), 3: steps(USUAL)}, {1})
    assert (found.kind, found.ranks, found.hosts) == ("mismatch", (2,), ())
    assert found.confidence >= SURE


def test_two_conflicting_ranks_are_decided_by_earlier_calls() -> None:
    found = verdict({0: steps(USUAL), 2: steps(2 * USUAL)}, {1, 3})
    assert (found.kind, found.ranks) == ("mismatch", (2,))


@pytest.mark.parametrize(
    ("calls", "ended"),
    [
        ({}, {2}),
        ({0: steps(USUAL), 1: steps(USUAL)}, {2}),
        ({0: steps(USUAL), 1: steps(USUAL)}, {2, 3}),
        ({rank: steps(USUAL) for rank in range(4)}, {2}),
        ({0: steps(USUAL), 1: steps(USUAL), 3: steps(USUAL)}, set()),
    ],
    ids=["no dump", "another is mute", "two were ended", "all agree", "nobody was ended"],
)
def test_if_the_dumps_do_not_decide_there_is_no_culprit(
    calls: Mapping[int, Sequence[dict[str, Any]]], ended: set[int]
) -> None:
    found = verdict(calls, ended)
    assert (found.kind, found.ranks, found.hosts, found.confidence) == ("not-known", (), (), 0.0)


def tp_calls(pair: int, last: int) -> list[dict[str, Any]]:
    group = (str(5 + pair), "mesh_tp")
    return [*(call(ALL, seq, USUAL) for seq in range(1, 4)), call(group, 1, last)]


@pytest.mark.parametrize(("usual", "ranks"), [(USUAL, (3,)), (OTHER, ())])
def test_calls_of_other_pairs_show_that_a_rank_without_a_dump_is_wrong(
    usual: int, ranks: tuple[int, ...]
) -> None:
    """If only one of the two ranks wrote a dump, either of them may be wrong."""
    calls = {0: tp_calls(0, usual), 1: tp_calls(0, usual), 2: tp_calls(1, USUAL)}
    found = verdict(calls, {3}, Mesh(dp_shard=2, tp=2))
    sure = found.ranks if found.confidence >= SURE else ()
    assert (sure, found.hosts) == (ranks, ())
