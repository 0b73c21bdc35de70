"""Saves the state with which the trainer would start its steps, on the mesh of each case.

A case is `{"config": …, "to": folder}`: the state with which `config` starts or resumes is saved
below `to`, except with `unsaved`. Its answer has `step`, and for each rank `read_bytes` (bytes read
from safetensors files) and `peak_bytes` (largest growth of the process while its weights were
filled). A case without `to` is a case of `training_worker.py`.
"""

import ctypes
import gc
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist

from orchestrator.contract.codec import decode
from orchestrator.contract.files.env import RankEnv
from orchestrator.contract.files.trainer_config import TrainingConfig
from tests.trainer.launch import training_worker
from tests.trainer.launch.training_worker import StopAfter
from trainer import main as main_module
from trainer.checkpoint.save import Checkpoints
from trainer.config import complete
from trainer.loop import Training
from trainer.main import train_on
from trainer.model import weights
from trainer.parallel import building
from trainer.rank.reporter import Reporter
from trainer.rank.runtime import Runtime


def resident_bytes(key: str) -> int:
    """`VmRSS`, or `VmHWM`, which is the highest `VmRSS` since `reset_peak`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def trim_heap() -> None:
    """Return freed memory to the kernel. Otherwise a case reuses it and its growth is not seen."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


class Measured:
    """Measures what filling the weights reads and how much memory it takes."""

    def __init__(self) -> None:
        self.read_bytes = 0
        self.peak_bytes = 0

    def read_part(self, *arguments: Any) -> int:
        read = READ_PART(*arguments)
        self.read_bytes += read
        return read

    def first_weights(self, *arguments: Any, **options: Any) -> None:
        reset_peak()
        before = resident_bytes("VmRSS")
        with mock.patch.object(weights, "read_part", self.read_part):
            weights.first_weights(*arguments, **options)
        # Called several times with quantisation, once per layer that is quantised while filling.
        self.peak_bytes = max(self.peak_bytes, resident_bytes("VmHWM") - before)


READ_PART = weights.read_part


def run_case(case: dict[str, Any], env: RankEnv) -> dict[str, Any]:
    return save_case(case, env) if "to" in case else training_worker.run_case(case, env)


def save_case(case: dict[str, Any], env: RankEnv) -> dict[str, Any]:
    config = complete(decode(TrainingConfig, case["config"]), env.world_size)
    reporter = Reporter(env)
    stop: Any = StopAfter(None, reporter)
    runtime = Runtime(env=env, reporter=reporter, drills=(), stop=stop, clock=lambda: 0.0)
    steps = []

    def save_at_once(job: Training, done: int) -> int:
        state, spec = job.checkpoints.state, job.config.checkpoint
        folder = Path(case["to"])
        folder.parent.mkdir(parents=True, exist_ok=True)
        if not case.get("unsaved"):
            Checkpoints(folder, state, spec, reporter).save_or_raise(done)
        steps.append(done)
        return 0

    measured = Measured()
    trim_heap()
    with (
        mock.patch.object(main_module, "train", save_at_once),
        mock.patch.object(building, "first_weights", measured.first_weights),
    ):
        train_on(training_worker.arranged(config.mesh, env), config, runtime)
    reporter.close()
    told: list[Any] = [None] * env.world_size
    dist.all_gather_object(told, (measured.read_bytes, measured.peak_bytes))
    return {
        "step": steps[0],
        "read_bytes": [read for read, _ in told],
        "peak_bytes": [peak for _, peak in told],
    }
