"""What supervision costs the training: tokens/s under ndctl against bare torchrun, in turn.

    python benchmarks/overhead.py [ALTERNATIONS]

The same trainer, model, data, seed and four ranks; ndctl adds two agents, keepers and heartbeats.
Target: at least 0.99.
"""

import statistics
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.jobs import metrics_of, sets, under_ndctl, under_torchrun
from benchmarks.timing import machine, ratio, spread

STEPS = 60
WARM_UP = 15
OPTIONS = sets(train__steps=STEPS, data__sequence_length=128, checkpoint__every_steps=1000)
LIMIT_S = 300.0


def main(alternations: int) -> None:
    rates: dict[str, list[float]] = {"ndctl": [], "torchrun": []}
    for turn in range(alternations):
        names = list(rates) if turn % 2 == 0 else list(reversed(rates))
        for name in names:
            rates[name].append(tokens_per_second(name))
    print(machine())
    for name, values in rates.items():
        print(f"{name:<9} {spread(values, 'tokens/s', 0)}")
    print(f"ndctl / torchrun {ratio(rates, 'ndctl', 'torchrun')}, target at least 0.99")


def tokens_per_second(name: str) -> float:
    """Median over the steps after the warm-up."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        start = under_ndctl(root, OPTIONS) if name == "ndctl" else under_torchrun(root, OPTIONS, 0)
        with start as run:
            deadline = time.monotonic() + LIMIT_S
            while len(metrics_of(run)) < STEPS:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{name} did not do {STEPS} steps in {LIMIT_S:.0f} s")
                time.sleep(1.0)
            lines = metrics_of(run)[WARM_UP:]
            return float(statistics.median(line["tokens_per_second"] for line in lines))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
