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
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.measure.timing import interval, machine

LIMIT_S = 3000.0
MIB = 1 << 20


def main(alternations: int, ranks: int, folder: Path | None) -> None:
    result = run(alternations, ranks, folder)
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


def run(alternations: int, ranks: int, folder: Path | None) -> dict[str, Any]:
    """What rank 0 measured."""
    with tempfile.TemporaryDirectory(dir=folder) as out:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={ranks}", "-m", "benchmarks.checkpoint.rank"]
        subprocess.run(
            [*command, out, str(alternations)],
            check=True,
            timeout=LIMIT_S,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        result: dict[str, Any] = json.loads((Path(out) / "result.json").read_text())
    return result


def middle(values: list[float], digits: int) -> str:
    """The median and its 95 % interval."""
    low, high = interval(values)
    return f"{statistics.median(values):.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("alternations", type=int, nargs="?", default=11)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="on the disk to measure [/tmp]")
    args = parser.parse_args()
    main(args.alternations, args.ranks, args.folder)
