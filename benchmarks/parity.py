"""Measures every cell of the parity table and prints benchmarks/results/parity.md.

python -m benchmarks.parity [RANKS...] > benchmarks/results/parity.md
python -m benchmarks.parity --compiled [RANKS...] > benchmarks/results/parity_compiled.md
"""

import argparse
import platform
import sys
import tempfile
from pathlib import Path

from benchmarks.measure.timing import machine
from tests.trainer.parallel.parity_cells import (
    COMPILED,
    GRAD_NORM,
    GRAD_NORM_BF16,
    LOSS,
    LOSS_BF16,
    TABLE,
    Cell,
    Difference,
    measure,
)

INTRODUCTION = f"""# Parity

Every mesh and method is compared with training in one process: same first weights, same samples,
five AdamW steps with clipping. The columns give the largest difference of the loss (absolute) and
of the gradient norm (relative) over the steps. Limits in float32: {LOSS:g} and {GRAD_NORM:g}. Where
the model computes in bfloat16 the reference is one process in float32, and the limits are
{LOSS_BF16:g} and {GRAD_NORM_BF16:g}. The tests hold the same table
(`tests/trainer/parallel/parity_cells.py`). `make test` runs the cells with 2 and 4 ranks that are
not `rare`, with one model each; `make test-all` runs all cells with all models.

With document masks, qwen3 differs most: up to 9.5e-06 under tp, 2.9e-06 under cp. No axis causes
this. Adam divides each gradient by its own size plus `eps` (1e-8), so it takes a step of full
length also where a gradient is only a rounding error. One process differs from itself by about
1e-05 if its gradients are disturbed by half a unit in the last place of each parameter's largest
gradient, and by less than 1e-07 with `eps` 1e-3
(`test_rounding_alone_explains_the_differences_with_document_masks`).

    python -m benchmarks.parity > benchmarks/results/parity.md

Measured on {machine()}, {platform.system()}, gloo.
"""

COMPILED_INTRODUCTION = f"""# Parity of compiled layers

Every mesh and method with `train.compile: true` is compared with training in one process with
eager layers, as in [parity](parity.md), with one model in turn over three steps. The schedule
zbv cannot be compiled. The limits are the same.

    python -m benchmarks.parity --compiled > benchmarks/results/parity_compiled.md

Measured on {machine()}, {platform.system()}, gloo.
"""


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("ranks", nargs="*", type=int, default=list(TABLE))
    args = parser.parse_args()
    print(COMPILED_INTRODUCTION if args.compiled else INTRODUCTION)
    return 1 if sum(print_table(num_ranks, args.compiled) for num_ranks in args.ranks) else 0


def print_table(num_ranks: int, compiled: bool) -> int:
    """Measure the cells of so many ranks. Returns how many are out of bounds."""
    print(f"## {num_ranks} ranks\n")
    print("| mesh and method | model | loss | gradient norm | |")
    print("|---|---|---|---|---|")
    table, failed = COMPILED if compiled else TABLE, 0
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder), num_ranks, all_models=not compiled, table=table)
        for cell, model, difference in found:
            good = difference.within(*cell.bounds)
            failed += not good
            print(row(cell, model, difference, good), flush=True)
    print()
    return failed


def row(cell: Cell, model: str, found: Difference, good: bool) -> str:
    verdict = "" if good else "**out of bounds**"
    return f"| {cell.name} | {model} | {found.loss:.1e} | {found.grad_norm:.1e} | {verdict} |"


if __name__ == "__main__":
    sys.exit(main())
