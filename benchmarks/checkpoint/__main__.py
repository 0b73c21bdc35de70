"""Checkpoints on the disk: what they cost training, and how long they take to load.

    python -m benchmarks.checkpoint [ALTERNATIONS] [--ranks 2] [--folder DIR]

The ranks train one model, and each way to save has its turn: ours as the trainer does without and
with checkpoints in memory, and torch's `async_save` in a thread and in a process of its own, with a
group of its own, staging buffers that are kept, a cached plan, and files that are synced. Ours also
writes checksums and a marker. In each turn a plain copy of the same bytes into memory that is in
use already is timed first. DIR is on the disk to measure.

Ranks with one thread each on as many processors leave none to a save. Give one rank per two
processors, as a host with GPUs has, for the other case.

Targets: training waits at most 1.2 of the copy, and steps take at most 1.03 while the files are
written.
"""

import argparse
import tempfile
from pathlib import Path

from benchmarks.measure.ranks import run_ranks
from benchmarks.measure.timing import machine, middle

MIB = 1 << 20


def main(alternations: int, ranks: int, folder: Path | None) -> None:
    with tempfile.TemporaryDirectory(dir=folder) as out:
        result = run_ranks("benchmarks.checkpoint.rank", ranks, Path(out), alternations)
    print(f"{machine()}, {ranks} ranks, {alternations} alternations")
    print(f"a step takes {middle(result['step_s'], 3)} s, a rank keeps {result['mib']:.0f} MiB\n")
    print("| saved by | wait / copy | step while writing | all it costs, in steps | s | MiB |")
    print("|---|---|---|---|---|---|")
    for name, turns in result["saves"].items():
        columns = {key: [turn[key] for turn in turns] for key in turns[0]}
        cells = [middle(columns[key], 2) for key in ("wait", "slowdown", "steps", "write_s")]
        print(f"| {name} | {' | '.join(cells)} | {columns['num_bytes'][-1] / MIB:.0f} |")
    print("\n| loaded by | s |\n|---|---|")
    for name, seconds in result["loads"].items():
        print(f"| {name} | {middle(seconds, 2)} |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("alternations", type=int, nargs="?", default=11)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="on the disk to measure [/tmp]")
    args = parser.parse_args()
    main(args.alternations, args.ranks, args.folder)
