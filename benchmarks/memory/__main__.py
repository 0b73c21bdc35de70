"""The planner's memory against what the trainer itself allocates, cell by cell.

    python -m benchmarks.memory [--cells 8b-8 ...]

The trainer's own model is built as one rank of a fake world and does one real step with fake
tensors (`benchmarks/traced`): Llama 3 8B on 64 ranks needs neither a GPU nor the memory of one.
"""

import argparse
import sys
import time
import warnings

from benchmarks.measure.timing import machine
from benchmarks.memory.cells import CELLS, compare

MIB = 1 << 20


def main(names: list[str]) -> int:
    print(machine())
    print("| cell, MiB | planned | traced | error | states exact |")
    print("|---|---|---|---|---|")
    worst = 0.0
    for name in names:
        begun = time.perf_counter()
        found = compare(CELLS[name])
        worst = max(worst, abs(found.error))
        planned, peak = (round(b / MIB) for b in (found.planned.peak_bytes, found.traced.peak))
        print(
            f"| {name} | {planned} | {peak}"
            f" | {found.error:+.1%} | {'yes' if found.has_exact_states else 'no'} |"
            f" {time.perf_counter() - begun:.0f} s",
            flush=True,
        )
    print(f"largest error {worst:.1%}")
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Planned memory against the trainer's own.")
    parser.add_argument("--cells", nargs="+", choices=CELLS, default=list(CELLS))
    warnings.simplefilter("ignore")
    sys.exit(main(parser.parse_args().cells))
