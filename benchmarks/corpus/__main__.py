"""How well logs, kernel lines and dumps are classified that no rule was written from.

    python -m benchmarks.corpus [--heldout] [--misses | --heldout-misses]

Reads the cases of `corpus/`: the development set and the later rounds, or with `--heldout` the
fifth of the first round that is kept apart. The exit code is 0 if each of these is within its
limits, otherwise 1. A log is `right` if the case accepts its class and scope, and `generic` if the
class is not wrong but says too little. A broken host is `missed` if it would be used again. A
healthy host is `excluded` if it would not.

`--misses` lists each case that is not right, but never a held-out case, nor one of the kept half of
rounds 15 to 17: a score is worthless once rules were fixed with these cases in view.
`--heldout-misses` is for the end.
"""

import argparse
import sys
from collections.abc import Sequence

from benchmarks.corpus.cases import ROUNDS, read_cases, read_dump_cases
from benchmarks.corpus.report import kept_half, misses, passes, report
from benchmarks.corpus.score import run_cases, run_dump_cases


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.corpus")
    parser.add_argument("--heldout", action="store_true", help="score the part that is kept apart")
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--misses", action="store_true", help="list what is not right")
    shown.add_argument(
        "--heldout-misses", action="store_true", help="list it of the part that is kept apart"
    )
    options = parser.parse_args(arguments)
    if options.misses and options.heldout:
        parser.error("--misses is for development; --heldout-misses shows what is kept apart")
    part = "heldout" if options.heldout or options.heldout_misses else "development"
    logs, dumps = run_cases(read_cases(part)), run_dump_cases(read_dump_cases(part))
    rounds = run_cases(read_cases(ROUNDS)) if part == "development" else []
    if options.misses or options.heldout_misses:
        print("\n".join(misses([*logs, *dumps, *rounds])), end="\n\n")
    reports = [
        *report(f"{part}, logs", logs),
        *report(f"{part}, dumps", dumps, dumps=True),
        *((*report("rounds, logs", rounds), kept_half(rounds)) if rounds else ()),
    ]
    print("\n".join(reports))
    return 0 if passes(logs) and passes(dumps) and passes(rounds) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
