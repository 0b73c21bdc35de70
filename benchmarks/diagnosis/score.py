"""Simulated faults, and how often the analysis names the right rank."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from orchestrator.diagnosis.hang.analyse import analyse
from orchestrator.diagnosis.hang.verdicts import Diagnosis, HangEvidence
from tests.diagnosis.simulated_hang import FAULTS, JUDGED, MESHES, STOPS, random_hang


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    faults: int
    right: int
    """Whose culprit was named first."""
    wrong: int
    """For which hosts would be left out, and not the culprit's."""

    def within(self, limit: float) -> bool:
        return self.right >= limit * self.faults and 100 * self.wrong <= self.faults


def score(
    faults: int,
    lost: float,
    evaluator: bool = False,
    judge: Callable[[HangEvidence], Diagnosis] = analyse,
) -> Score:
    right: Counter[str] = Counter()
    all_: Counter[str] = Counter()
    named = wrong = 0
    for seed in JUDGED[:faults]:
        found = random_hang(seed, FAULTS[seed % len(FAULTS)], lost, evaluator)
        verdict = judge(found.scene)
        all_[found.fault] += 1
        right[found.fault] += verdict.ranks[:1] == (found.culprit,)
        named += bool(verdict.hosts)
        mine = None if found.culprit is None else found.scene.host(found.culprit)
        wrong += bool(verdict.hosts) and mine not in verdict.hosts
    share = right.total() / all_.total()
    stops = sum(right[fault] for fault in STOPS) / sum(all_[fault] for fault in STOPS)
    beside = " and a rank that evaluates" if evaluator else ""
    print(f"{faults} faults on {len(MESHES)} meshes{beside}, {lost:.0%} of the dumps missing:")
    print(f"  right rank first {share:.1%}; of ranks that stopped {stops:.1%}")
    print(f"  hosts left out {named}, wrong ones {wrong}")
    for fault in FAULTS:
        print(f"    {fault:<12}{right[fault]:>4} of {all_[fault]}")
    return Score(faults=all_.total(), right=right.total(), wrong=wrong)
