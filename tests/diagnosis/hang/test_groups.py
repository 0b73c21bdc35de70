"""Members of groups, which dumps of gloo do not list, and the ranks of the job."""

from collections.abc import Sequence

import pytest

from orchestrator.diagnosis.dumps.dump import MOST_RANKS
from orchestrator.diagnosis.hang.analyse import analyse
from orchestrator.diagnosis.hang.evidence_index import EvidenceIndex
from orchestrator.diagnosis.hang.report import diagnosis_text
from orchestrator.diagnosis.hang.verdicts import Diagnosis, HangEvidence, RankFacts
from orchestrator.diagnosis.hang.wait_graph import GUESSED
from tests.diagnosis.recorder import IN_ALL_REDUCE, IN_LOADER, Pg, Recorder, dumps_of, recorders

ALL = Pg("0", "default_pg", range(4))


def of_a_mesh(lost: Sequence[int]) -> Diagnosis:
    """A 2 x 2 mesh on which rank 2 is stuck before its all-reduce with rank 0."""
    dp = [Pg(str(1 + i), "mesh_dp", (i, i + 2)) for i in range(2)]
    tp = [Pg(str(3 + i), "mesh_tp", (2 * i, 2 * i + 1)) for i in range(2)]
    ranks = recorders(4, gloo=True)
    for step in range(8):
        for one in ranks:
            for _ in range(3):
                one.call(tp[one.rank // 2])
            if step < 7:
                one.call(dp[one.rank % 2])
    ranks[0].call(dp[0], state="started")
    ranks[1].call(dp[1])
    ranks[3].call(dp[1])
    ranks[1].call(tp[0], state="started")
    ranks[3].call(tp[1], state="started")
    return analyse(HangEvidence(dumps=dumps_of(ranks, lost)))


def test_a_rank_without_a_file_between_others_belongs_to_the_job() -> None:
    found = of_a_mesh(lost=(2,))
    assert (found.kind, found.ranks, found.no_dump) == ("never-entered", (2,), (2,))
    assert all(2 in waiting.unknown for waiting in found.waiting)
    assert of_a_mesh(lost=()).ranks == (2,)


def test_a_file_name_that_ends_in_a_date_is_not_a_rank() -> None:
    (dump,) = dumps_of([_of_all(Recorder(0, gloo=True))]).values()
    assert len(EvidenceIndex(HangEvidence(dumps={0: dump, 20_261_123: dump})).ranks) == 2
    assert MOST_RANKS > 100_000
    assert len(EvidenceIndex(HangEvidence(dumps={0: dump, 4095: dump})).ranks) == 4096


def _of_all(one: Recorder) -> Recorder:
    one.call(ALL, state="started")
    return one


def with_a_logger(lost: Sequence[int], desc: str) -> Diagnosis:
    """Ranks 0 to 2 train in one group, in which rank 1 is stuck. Rank 3 waits for a message of rank
    0, which gloo does not record."""
    trainers = Pg("1", desc, range(3))
    ranks = recorders(4, gloo=True)
    for number in range(8):
        for one in ranks[:3]:
            if number < 7 or one.rank != 1:
                one.call(trainers, state="completed" if number < 7 else "started")
    return analyse(HangEvidence(dumps=dumps_of(ranks, lost)))


def test_a_group_outside_the_mesh_has_only_the_members_that_used_it() -> None:
    for desc in ("undefined", "", "trainers"):
        found = with_a_logger(lost=(), desc=desc)
        assert (found.kind, found.ranks) == ("never-entered", (1,))


def test_if_all_ranks_with_dumps_wait_a_rank_without_one_is_suspected() -> None:
    found = with_a_logger(lost=(1,), desc="undefined")
    assert (found.kind, found.ranks, found.hosts) == ("never-entered", (1,), ())
    shown = diagnosis_text(found, HangEvidence(dumps={}))
    assert "possibly never-entered: " in shown
    assert "suspect     rank 1 " in shown
    assert "next        read the log of the rank" in shown
    assert "culprit" not in shown
    assert found.confidence <= GUESSED


def test_if_some_members_never_used_a_group_the_network_is_not_suspected() -> None:
    """Rank 1 hangs before its first use of the group, so no dump shows that it is a member."""
    ranks = recorders(4, gloo=True)
    for one in ranks:
        one.call(ALL)
    for rank in (0, 2):
        ranks[rank].call(Pg("1", "undefined", range(3)), state="started")
    facts = {
        rank: RankFacts(rank=rank, asked=True, stack=IN_LOADER if rank == 1 else IN_ALL_REDUCE)
        for rank in range(4)
    }
    found = analyse(HangEvidence(dumps=dumps_of(ranks), facts=facts))
    assert (found.kind, found.ranks, found.hosts) == ("alone", (1,), ())
    assert analyse(HangEvidence(dumps=dumps_of(ranks))).kind == "not-known"


@pytest.mark.parametrize("desc", ["undefined", "trainers", "mesh_dp"])
def test_if_every_rank_of_the_job_waits_in_a_group_the_network_is_suspected(
    desc: str,
) -> None:
    """No other rank can be a member, whatever the name of the group is."""
    ranks = recorders(4, gloo=True)
    everybody = Pg("1", desc, range(4))
    for one in ranks:
        one.call(ALL)
        one.call(everybody, state="started")
    found = analyse(HangEvidence(dumps=dumps_of(ranks), world=4))
    assert (found.kind, found.scope) == ("network", "fabric")
