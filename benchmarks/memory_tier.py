"""Checkpoints in memory: what they cost a step, and how soon a job trains again after a failure.

    python -m benchmarks.memory_tier [ALTERNATIONS]

The job has two hosts of two ranks on this machine. Cost: seconds of a step with a copy of every
step, without and with copies on the partner, and as a spec has it by default, over those without
checkpoints in memory; here the partner shares processors and memory bandwidth with the ranks, which
no cluster does. Recovery: seconds from `kill -9` of a rank, or of a host's agent with all its
ranks, to the first step that no attempt had done, with ranks of the other host that keep their
processes ("kept") and without, over the same restart from the disk (a checkpoint every ten steps)
and, for a rank, over `torchrun --max-restarts`. A spare replaces the killed host. Targets: at most
1.02 on CPUs; a rank at most 0.6 of the restart of the first version, 1.6 s.
"""

import argparse
import os
import re
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path

from benchmarks.jobs.local import metrics_of, rank_pid, sets, under_ndctl, under_torchrun
from benchmarks.measure.timing import machine, ratio, spread
from benchmarks.recovery import wait

STEPS, WARM_UP = 60, 15
SIZE: Mapping[str, object] = {"train__steps": 400, "data__sequence_length": 128}
KILL_AT = 18
"""The checkpoint on the disk is of step 10."""
TIERS: Mapping[str, Mapping[str, object]] = {
    "off": {"checkpoint__memory__every": "off"},
    "default": {},
    "own host": {"checkpoint__memory__every": 1, "checkpoint__memory__copies": 0},
    "partner": {"checkpoint__memory__every": 1, "checkpoint__memory__copies": 1},
}
AGENT = re.compile(rb"orchestrator\.backends\.entry\.agent\0")


def main(alternations: int) -> None:
    steps: dict[str, list[float]] = {name: [] for name in TIERS}
    recoveries: dict[str, dict[str, list[float]]] = {"rank": {}, "host": {}}
    lost: dict[str, list[int]] = {}
    load = []
    for _ in range(alternations):
        for name, options in TIERS.items():
            steps[name].append(step_s(options))
            print(f"step, {name}: {steps[name][-1]:.4f} s", flush=True)
        for victim, found in recoveries.items():
            others = ("torchrun",) if victim == "rank" else ()
            for name in ("kept", "memory", "disk", *others):
                seconds, redone = recovery(victim, name)
                found.setdefault(name, []).append(seconds)
                lost.setdefault(f"{victim}, {name}", []).append(redone)
                print(f"{victim}, {name}: {seconds:.2f} s, {redone} steps again", flush=True)
        load.append(os.getloadavg()[0])
    print(f"{machine()}, load {min(load):.0f} to {max(load):.0f}")
    for name in TIERS:
        print(f"step, {name:<9} {spread(steps[name], 's', 4)}, {ratio(steps, name, 'off')}")
    for victim, found in recoveries.items():
        for name, measured in found.items():
            again = statistics.median(lost[f"{victim}, {name}"])
            print(f"{victim}, {name:<9} {spread(measured, 's', 2)}, {again:.0f} steps again")
        for other in [name for name in found if name != "kept"]:
            print(f"{victim}, kept / {other}: {ratio(found, 'kept', other)}")


def step_s(options: Mapping[str, object]) -> float:
    """Median seconds of a step, after a warm-up."""
    every = {"checkpoint__every_steps": 10_000}
    with (
        tempfile.TemporaryDirectory() as folder,
        under_ndctl(Path(folder), sets(**SIZE, **every, **options)) as run,
    ):
        wait(lambda: len(metrics_of(run)) >= WARM_UP + STEPS)
        times: list[float] = [line["step_s"] + line["checkpoint_s"] for line in metrics_of(run)]
        return statistics.median(times[WARM_UP : WARM_UP + STEPS])


def recovery(victim: str, name: str) -> tuple[float, int]:
    """Seconds from the kill to the first new step, and the steps that were done again."""
    options = {**SIZE, "checkpoint__every_steps": 10, "checkpoint__keep": 50}
    options |= TIERS["partner" if name in ("kept", "memory") else "off"]
    options |= {"resilience__keep_ranks": True} if name == "kept" else {}
    options |= {"cluster__spare_hosts": 1} if victim == "host" else {}
    start: Callable[[Path], AbstractContextManager[Path]] = lambda root: (  # noqa: E731
        under_torchrun(root, sets(**options), 3)
        if name == "torchrun"
        else under_ndctl(root, sets(**options))
    )
    with tempfile.TemporaryDirectory() as folder, start(Path(folder)) as run:
        wait(lambda: len(metrics_of(run)) >= KILL_AT and (run / "checkpoints/step-10").exists())
        pid = rank_pid(run, 3) if victim == "rank" else agent_pid(run)
        os.kill(pid, signal.SIGKILL)
        begun, done = time.perf_counter(), metrics_of(run)[-1]["step"]
        wait(lambda: _newest(run) > done and metrics_of(run)[-1]["attempt"] > 1)
        seconds = time.perf_counter() - begun
        first = next(line for line in metrics_of(run) if line["attempt"] > 1)
        return seconds, max(0, done - first["step"] + 1)


def _newest(run: Path) -> int:
    lines = metrics_of(run)
    newest: int = lines[-1]["step"] if lines else 0
    return newest


def agent_pid(run: Path) -> int:
    """The agent of the host that trains and does not lead."""
    for place in Path("/proc").glob("[0-9]*"):
        try:
            command = (place / "cmdline").read_bytes()
        except OSError:
            continue
        if AGENT.search(command) and b"host-1\0" in command and str(run).encode() in command:
            return int(place.name)
    raise RuntimeError(f"no agent of host-1 of {run}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("alternations", type=int, nargs="?", default=5)
    main(parser.parse_args().alternations)
