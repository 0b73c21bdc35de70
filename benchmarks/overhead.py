"""What supervision costs the training: the same job under ndctl and under bare torchrun, in turn.

    python -m benchmarks.overhead [--script] [--hosts H] [--ranks R] [ALTERNATIONS] [-- OPTIONS]

Trainer, model, data, seed and the four ranks are the same. ndctl adds two agents with a leader,
rank watchers, heartbeats and the flight recorder. Tokens/s and the processor time of all processes
per step are compared; on a busy machine the second says more. The stopwatch around a rank's own
work, which runs in any case, is measured alone, with the heartbeat. Target: at least 0.99 of the
tokens/s.

With `--script` it is a user's own script (`own_script.py`, which takes OPTIONS), and the target is
0.995.
"""

import argparse
import itertools
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.jobs.local import (
    metrics_of,
    script_under_ndctl,
    script_under_torchrun,
    sets,
    steps_of,
    under_ndctl,
    under_torchrun,
)
from benchmarks.measure.timing import machine, ratio, spread

STEPS = 60
WARM_UP = 15
OPTIONS = sets(train__steps=10 * STEPS, data__sequence_length=128, checkpoint__every_steps=10_000)
LIMIT_S = 300.0
SCRIPT_WARM_UP = 350
"""Until then the host has imported what the script imports, which it does once in a job."""
SCRIPT_STEPS = 650
HOOK_TURNS = 20_000
TICK_S = 1 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Cost:
    tokens_per_second: float
    """Median over the steps after the warm-up."""
    cpu_s: float
    """Of all processes, a step."""


def main(alternations: int) -> None:
    costs: dict[str, list[Cost]] = {"ndctl": [], "torchrun": []}
    load = []
    for turn in range(alternations):
        names = list(costs) if turn % 2 == 0 else list(reversed(costs))
        for name in names:
            cost = cost_of(name)
            costs[name].append(cost)
            load.append(os.getloadavg()[0])
            rate, cpu_s_step = cost.tokens_per_second, cost.cpu_s
            print(
                f"{turn + 1} {name}: {rate:.0f} tokens/s, {cpu_s_step:.3f} CPU s/step", flush=True
            )
    print(f"{machine()}, load {min(load):.0f} to {max(load):.0f}")
    rates = {name: [cost.tokens_per_second for cost in each] for name, each in costs.items()}
    cpu = {name: [cost.cpu_s for cost in each] for name, each in costs.items()}
    for name in costs:
        print(
            f"{name:<9} {spread(rates[name], 'tokens/s', 0)}, {spread(cpu[name], 'CPU s/step', 3)}"
        )
    print(f"ndctl / torchrun, tokens/s: {ratio(rates, 'ndctl', 'torchrun')}, target at least 0.99")
    print(f"ndctl / torchrun, CPU time: {ratio(cpu, 'ndctl', 'torchrun')}")
    print(f"stopwatch {stopwatch_us():.1f} us a step, heartbeat {heartbeat_us():.1f} us")


def cost_of(name: str) -> Cost:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        bare = under_torchrun(root, OPTIONS, 0, {"TORCH_FR_BUFFER_SIZE": "0"})
        with under_ndctl(root, OPTIONS) if name == "ndctl" else bare as run:
            first, begun = _done(run, WARM_UP), cpu_s(root)
            last, ended = _done(run, STEPS), cpu_s(root)
            lines = metrics_of(run)[WARM_UP:last]
            rate = statistics.median(line["tokens_per_second"] for line in lines)
            return Cost(float(rate), (ended - begun) / (last - first))


def script(alternations: int, hosts: int, ranks: int, words: list[str]) -> None:
    """Steps per second of a user's own script; its tokens per step do not change."""
    rates: dict[str, list[float]] = {"ndctl": [], "torchrun": []}
    cpu: dict[str, list[float]] = {"ndctl": [], "torchrun": []}
    words = ["--save-every=1000000", *words]
    for turn in range(alternations):
        for name in list(rates) if turn % 2 == 0 else list(reversed(rates)):
            with tempfile.TemporaryDirectory() as folder:
                root = Path(folder)
                bare = script_under_torchrun(root, hosts * ranks, 0, words)
                ours = script_under_ndctl(root, hosts, ranks, words)
                with ours if name == "ndctl" else bare as out:
                    rate, cpu_s_step = cost_of_script(root, out)
                    rates[name].append(rate)
                    cpu[name].append(cpu_s_step)
            print(f"{turn + 1} {name}: {rate:.2f} steps/s, {cpu_s_step:.4f} CPU s/step", flush=True)
    print(f"{machine()}, {hosts} hosts of {ranks} ranks under ndctl")
    for name, measured in rates.items():
        print(f"{name:<9} {spread(measured, 'steps/s', 2)}, {spread(cpu[name], 'CPU s/step', 4)}")
    print(f"ndctl / torchrun, steps/s: {ratio(rates, 'ndctl', 'torchrun')}, target at least 0.995")
    print(f"ndctl / torchrun, CPU time: {ratio(cpu, 'ndctl', 'torchrun')}")
    print(f"hook of an optimizer step, with its heartbeat: {hook_us():.1f} us")


def cost_of_script(root: Path, out: Path) -> tuple[float, float]:
    """Steps per second, from the median step after the warm-up, and processor time of all processes
    for a step."""
    first, begun = len(_steps(out, SCRIPT_WARM_UP)), cpu_s(root)
    lines, ended = _steps(out, SCRIPT_STEPS), cpu_s(root)
    used = (ended - begun) / (len(lines) - first)
    times = [line["time"] for line in lines[SCRIPT_WARM_UP:SCRIPT_STEPS]]
    return float(1 / statistics.median(b - a for a, b in itertools.pairwise(times))), used


def _steps(out: Path, number: int) -> list[dict[str, Any]]:
    """All steps so far, once there are so many."""
    deadline = time.monotonic() + LIMIT_S
    while len(lines := steps_of(out)) < number:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{out} has {len(lines)} steps after {LIMIT_S:.0f} s")
        time.sleep(0.05)
    return lines


def _done(run: Path, steps: int) -> int:
    """How many steps are done, once these are."""
    deadline = time.monotonic() + LIMIT_S
    while (done := len(metrics_of(run))) < steps:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{run} did not do {steps} steps in {LIMIT_S:.0f} s")
        time.sleep(0.05)
    return done


def cpu_s(root: Path) -> float:
    """Processor time so far of every process that has `root` on its command line."""
    total = 0.0
    for place in Path("/proc").glob("[0-9]*"):
        try:
            if str(root).encode() in (place / "cmdline").read_bytes():
                words = (place / "stat").read_text().rpartition(")")[2].split()
                total += (int(words[11]) + int(words[12])) * TICK_S
        except OSError:
            continue
    return total


def stopwatch_us() -> float:
    """Of a step whose update, forward and backward each leave and enter a collective."""
    import torch

    from trainer.measure.timing import stopwatch

    watch = stopwatch(torch.device("cpu"))
    begun = time.perf_counter()
    for _ in range(HOOK_TURNS):
        for _ in range(3):
            watch.after_collective()
            watch.before_collective()
        watch.pop_seconds()
    return 1e6 * (time.perf_counter() - begun) / HOOK_TURNS


def hook_us() -> float:
    """What each optimizer step of an unchanged script calls."""
    from ndctl.rank.link import Link
    from orchestrator.contract.files.env import RankEnv
    from orchestrator.contract.files.run_dir import RunDir
    from trainer.program.step_log import StepLog
    from trainer.program.torch_hooks import OptimizerSteps

    with listening_agent() as agent:
        link = Link({"NDCTL_HEARTBEAT_SOCKET": agent.getsockname()})
        log = StepLog(link, RunDir(Path()), RankEnv())
        steps = OptimizerSteps(link, log, lambda: None)
        # Any object counts as an optimizer.
        return mean_us(agent, lambda: steps.stepped(log, (), {}))


def heartbeat_us() -> float:
    """To an agent that listens."""
    from orchestrator.contract.files.env import RankEnv
    from trainer.rank.reporter import Reporter

    with listening_agent() as agent:
        reporter = Reporter(RankEnv(heartbeat_socket=agent.getsockname()))
        beat = partial(reporter.beat, "train", loss=2.5, tokens_per_second=900.0, own_s=0.1)
        took = mean_us(agent, beat)
        reporter.close()
        return took


@contextmanager
def listening_agent() -> Iterator[socket.socket]:
    with (
        tempfile.TemporaryDirectory() as folder,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as agent,
    ):
        agent.bind(f"{folder}/ranks.sock")
        agent.setblocking(False)
        yield agent


def mean_us(agent: socket.socket, call: Callable[[], object]) -> float:
    """Of a call that sends the agent one message."""
    took = 0.0
    for _ in range(HOOK_TURNS):
        begun = time.perf_counter()
        call()
        took += time.perf_counter() - begun
        agent.recv(65_536)
    return 1e6 * took / HOOK_TURNS


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="What supervision costs the training.")
    parser.add_argument("alternations", nargs="?", type=int, default=5)
    parser.add_argument("--script", action="store_true", help="a user's own script")
    parser.add_argument("--hosts", type=int, default=2, help="of the script")
    parser.add_argument("--ranks", type=int, default=1, help="of a host")
    asked, more = parser.parse_known_args()
    if asked.script:
        script(asked.alternations, asked.hosts, asked.ranks, [one for one in more if one != "--"])
    else:
        main(asked.alternations)
