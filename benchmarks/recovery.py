"""From `kill -9` of a rank to its detection, and to the first new step.

    python benchmarks/recovery.py [ALTERNATIONS]

ndctl (2 hosts of 2 ranks, stopped and started again across both) against plain
`torchrun --max-restarts` (4 ranks of one host, which spares it any agreement between hosts), with
the same trainer, model, data and checkpoints, in turn. Both resume from the checkpoint of step 10.
"""

import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from benchmarks.jobs import metrics_of, rank_pid, sets, under_ndctl, under_torchrun
from benchmarks.timing import machine, ratio, spread

OPTIONS = sets(
    train__steps=400,
    data__sequence_length=128,
    checkpoint__every_steps=10,
    checkpoint__keep=50,
)
KILL_AT = 14
LIMIT_S = 180.0


def main(alternations: int) -> None:
    seen: dict[str, dict[str, list[float]]] = {}
    for _ in range(alternations):
        for name, start, detected in (
            ("ndctl", lambda root: under_ndctl(root, OPTIONS), detected_by_ndctl),
            ("torchrun", lambda root: under_torchrun(root, OPTIONS, 3), detected_by_torchrun),
        ):
            for what, seconds in measure(start, detected).items():
                seen.setdefault(what, {}).setdefault(name, []).append(seconds)
    print(machine())
    for what, values in seen.items():
        for name, measured in values.items():
            print(f"{what:<11} {name:<9} {spread(measured, 's', 3)}")
        print(f"{what:<11} ndctl / torchrun {ratio(values, 'ndctl', 'torchrun')}")


def measure(
    start: Callable[[Path], AbstractContextManager[Path]], detected: Callable[[Path], bool]
) -> dict[str, float]:
    """Seconds from the kill to each thing."""
    with tempfile.TemporaryDirectory() as folder, start(Path(folder)) as run:
        wait(lambda: len(metrics_of(run)) >= KILL_AT and (run / "checkpoints/step-10").exists())
        done = len(metrics_of(run))
        os.kill(rank_pid(run, 1), signal.SIGKILL)
        begun = time.perf_counter()
        wait(lambda: detected(run))
        seen = time.perf_counter() - begun
        killed_after = len(metrics_of(run))
        wait(lambda: len(metrics_of(run)) > max(done, killed_after))
        return {"detection": seen, "new step": time.perf_counter() - begun}


def detected_by_ndctl(run: Path) -> bool:
    """The journal, on disk, says that a rank ended."""
    lines = (run / "journal.jsonl").read_text().split("\n")[:-1]
    return any(json.loads(line)["event"]["kind"] == "RankExited" for line in lines)


def detected_by_torchrun(run: Path) -> bool:
    return "failed (exitcode" in (run / "torchrun.log").read_text()


def wait(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("nothing happened")
        time.sleep(0.005)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 3)
