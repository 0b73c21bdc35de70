"""The benchmark of the diagnosis fails if it exceeds one of its limits."""

import pytest
from msgspec.structs import replace

from benchmarks.diagnosis.score import Score, score
from orchestrator.diagnosis.hang.analyse import analyse
from orchestrator.diagnosis.hang.verdicts import Diagnosis, HangEvidence


@pytest.mark.parametrize(
    ("right", "wrong", "fine"),
    [(588, 6, True), (587, 6, False), (588, 7, False), (600, 0, True)],
)
def test_right_ranks_and_wrong_hosts_both_have_a_limit(right: int, wrong: int, fine: bool) -> None:
    assert Score(faults=600, right=right, wrong=wrong).within(0.98) == fine


def test_an_analysis_that_names_wrong_hosts_exceeds_the_limit() -> None:
    def name_wrong_host(scene: HangEvidence) -> Diagnosis:
        verdict = analyse(scene)
        return replace(verdict, hosts=("wrong-host",)) if verdict.hosts else verdict

    assert score(20, 0.0).within(0.98)
    wrong = score(20, 0.0, judge=name_wrong_host)
    assert wrong.right == 20
    assert wrong.wrong > 0
    assert not wrong.within(0.98)
