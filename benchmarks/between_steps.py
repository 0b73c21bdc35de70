"""What rank 0 does between two steps, in microseconds: everything but training.

    python -m benchmarks.between_steps [--folder DIR] [--steps 150]

It trains a tiny model on this process alone, with an agent's socket and a fence, and subtracts from
the time of each step what training itself takes: the data, the passes, the all-reduce of the totals
and the update. What is left, as the median of all steps, are the norm of the gradients, records,
heartbeats, measurements and Python between them. DIR is on the file system to measure.
"""

import argparse
import contextlib
import json
import socket
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist

from benchmarks.measure.timing import machine
from orchestrator.contract.codec import decode
from orchestrator.contract.files.env import RankEnv
from orchestrator.contract.files.fence import Fence, write_fence
from orchestrator.contract.files.run_dir import RunDir
from orchestrator.contract.files.trainer_config import TrainingConfig
from tests.trainer.launch.tiny_runs import tiny
from trainer import main
from trainer.config import complete
from trainer.data.loader import Loader
from trainer.optimizer import ShardAdam
from trainer.parallel.passes import WholeModel
from trainer.rank.ranks import arrange, process_group
from trainer.rank.reporter import Reporter
from trainer.rank.runtime import Runtime

PARTS = [
    (Loader, "of_step"),
    (WholeModel, "train"),
    (dist, "all_reduce"),
    (ShardAdam, "step"),
]


class NeverStopped:
    asked = on_disk = save = False


@contextlib.contextmanager
def timed(marks: list[tuple[float, float]]) -> Iterator[None]:
    """Append the time, and the seconds of training so far, at the begin of each step."""
    spent = [0.0]

    def wrap(call: Callable[..., Any]) -> Callable[..., Any]:
        def timing(*given: Any, **named: Any) -> Any:
            begun = time.perf_counter()
            if call.__name__ == "of_step":
                marks.append((begun, spent[0]))
            try:
                return call(*given, **named)
            finally:
                spent[0] += time.perf_counter() - begun

        return timing

    with contextlib.ExitStack() as stack:
        for owner, name in PARTS:
            stack.enter_context(mock.patch.object(owner, name, wrap(getattr(owner, name))))
        yield


def measure(folder: Path, steps: int) -> float:
    """Median of the seconds between two steps that are not training, of one job."""
    out, sink = folder / "job", socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    run = RunDir(out)
    out.mkdir()
    write_fence(run.fence, Fence(leader="a", attempt=1))
    values = tiny(out, steps=steps)
    with tempfile.TemporaryDirectory() as local, contextlib.closing(sink):
        sink.bind(f"{local}/ranks.sock")
        env = RankEnv(heartbeat_socket=f"{local}/ranks.sock")
        config: TrainingConfig = complete(decode(TrainingConfig, values), 1)
        stop: Any = NeverStopped()
        reporter = Reporter(env)
        runtime = Runtime(env=env, reporter=reporter, drills=(), stop=stop, clock=time.time)
        marks: list[tuple[float, float]] = []
        with timed(marks), mock.patch("trainer.checkpoint.save.Checkpoints.save_or_raise"):
            main.train_on(arrange(config.mesh, env), config, runtime)
        reporter.close()
    return statistics.median(
        (end - begun) - (after - before) for (begun, before), (end, after) in pairwise(marks)
    )


def run(folder: Path | None, steps: int, repeats: int) -> list[float]:
    found = []
    with warnings.catch_warnings(), process_group(RankEnv()):
        warnings.simplefilter("ignore")
        for _ in range(repeats):
            with tempfile.TemporaryDirectory(dir=folder) as fresh:
                found.append(measure(Path(fresh), steps) * 1e6)
    return sorted(found)


def main_line() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--folder", type=Path, help="on the file system to measure [/tmp]")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    found = run(args.folder, args.steps, args.repeats)
    print(machine())
    print(
        json.dumps(
            {"median_us": round(statistics.median(found)), "all_us": [round(it) for it in found]}
        )
    )


if __name__ == "__main__":
    main_line()
