"""From `kill -9` of a rank to its detection, and to the first new step.

    python -m benchmarks.recovery [--script] [--hosts H] [--ranks R] [ALTERNATIONS]

ndctl (2 hosts of 2 ranks, stopped and started again across both) against plain
`torchrun --max-restarts` (4 ranks of one host, which spares it any agreement between hosts), with
the same trainer, model, data and checkpoints, in turn. Both resume from the checkpoint of step 10.

With `--script` it is a user's own script (`own_script.py`), which uses transformers. Target: at
most 0.5 times the seconds of torchrun from the kill to the first new step.
"""

import argparse
import json
import os
import signal
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from benchmarks.jobs.local import (
    metrics_of,
    rank_pid,
    script_under_ndctl,
    script_under_torchrun,
    sets,
    steps_of,
    under_ndctl,
    under_torchrun,
)
from benchmarks.measure.timing import machine, ratio, spread

OPTIONS = sets(
    train__steps=400, data__sequence_length=128, checkpoint__every_steps=10, checkpoint__keep=50
)
KILL_AT = 14
LIMIT_S = 180.0
SETTLE_S = 15.0


def script(alternations: int, hosts: int, ranks: int) -> None:
    """Seconds from the kill of the last rank to the first new step of a user's own script."""
    took: dict[str, list[float]] = {"ndctl": [], "torchrun": []}
    for _ in range(alternations):
        for name, seconds in took.items():
            with tempfile.TemporaryDirectory() as folder:
                root = Path(folder)
                bare = script_under_torchrun(root, hosts * ranks, 3)
                with script_under_ndctl(root, hosts, ranks) if name == "ndctl" else bare as out:
                    seconds.append(to_new_step(out, hosts * ranks - 1))
            print(f"{name}: {seconds[-1]:.2f} s", flush=True)
    print(f"{machine()}, {hosts} hosts of {ranks} ranks under ndctl")
    for name, measured in took.items():
        print(f"new step {name:<9} {spread(measured, 's', 2)}")
    print(f"new step ndctl / torchrun {ratio(took, 'ndctl', 'torchrun')}, target at most 0.5")


def to_new_step(out: Path, victim: int) -> float:
    wait(lambda: len(steps_of(out)) >= KILL_AT)
    # The hosts import what the script imported, as they would long before a failure.
    time.sleep(SETTLE_S)
    os.kill(int((out / f"rank-{victim}.pid").read_text()), signal.SIGKILL)
    begun = time.time()
    attempt = steps_of(out)[-1]["attempt"]
    wait(lambda: steps_of(out)[-1]["attempt"] > attempt)
    first = next(line for line in steps_of(out) if line["attempt"] > attempt)
    return float(first["time"]) - begun


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
    parser = argparse.ArgumentParser(description="From the kill of a rank to the first new step.")
    parser.add_argument("alternations", nargs="?", type=int, default=3)
    parser.add_argument("--script", action="store_true", help="a user's own script")
    parser.add_argument("--hosts", type=int, default=2, help="of the script")
    parser.add_argument("--ranks", type=int, default=2, help="of a host")
    asked = parser.parse_args()
    if asked.script:
        script(asked.alternations, asked.hosts, asked.ranks)
    else:
        main(asked.alternations)
