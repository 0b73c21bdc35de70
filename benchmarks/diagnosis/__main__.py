"""How often `ndctl diagnose` names the right rank, and how long it takes at 100,000 ranks.

    python -m benchmarks.diagnosis [FAULTS] [RANKS]

Faults are simulated (`tests/diagnosis/simulated_hang.py`): hangs, skipped, misordered and
mismatched operations over meshes of all axes, by seeds that the analysis was not made with. Limits:
the right rank first in 98 of 100, in 95 where a quarter of the dumps is missing, and at most one
wrong host in 100; 100,000 ranks in 60 s and 4 GiB.
"""

import sys

from benchmarks.diagnosis.large_job import large
from benchmarks.diagnosis.score import score
from benchmarks.measure.timing import machine


def main(faults: int, ranks: int) -> int:
    print(machine())
    fine = True
    for lost, limit in ((0.0, 0.98), (0.25, 0.95)):
        fine &= score(faults, lost).within(limit)
    score(faults, 0.0, evaluator=True)
    return 0 if large(ranks) and fine else 1


if __name__ == "__main__":
    arguments = [int(argument) for argument in sys.argv[1:]]
    sys.exit(main(*(arguments + [600, 100_000][len(arguments) :])))
