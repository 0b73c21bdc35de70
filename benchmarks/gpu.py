"""What GPUs show: tokens/s, MFU and peak memory, and how they compare with the planner's figures.

    python -m benchmarks.gpu [--models 1b 3b] [--steps 20] [--tiny]

One command for one CUDA GPU: 1B and 3B Llama in bfloat16, with and without torch.compile, under
every activation checkpointing; given two or more GPUs, FSDP, tensor and context parallel over them
as well. Each case is a run of the bundled trainer under torchrun, so one that runs out of memory
costs a row and nothing else. `--tiny` runs a few cases of a tiny model, which a CPU can.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace

from benchmarks.jobs import metrics_of
from benchmarks.timing import machine
from orchestrator.contract.codec import decode, encode
from orchestrator.contract.plan import StepTime
from orchestrator.contract.spec.job_spec import JobSpec
from orchestrator.contract.spec.model_presets import PRESETS
from orchestrator.inventory.hosts import Inventory
from orchestrator.inventory.local import this_machine
from orchestrator.plan.figures import show_bytes
from orchestrator.plan.memory.reserve import RESERVE
from orchestrator.plan.planner import plan
from orchestrator.plan.training import trainer_config

LIMIT_S = 400.0
WARM_UP = 5
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "num_key_value_heads": 8,
    "intermediate_size": 8192,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
MODELS: Mapping[str, dict[str, Any]] = {
    # The shapes of Llama 3.2, from the models' own config.json.
    "1b": {**LLAMA, "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32},
    "3b": {**LLAMA, "hidden_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 24},
    "tiny": dict(PRESETS["llama-tiny"]),
}
MICRO_BATCH = {"1b": 4, "3b": 2, "tiny": 2}


@dataclass(frozen=True, slots=True)
class Case:
    model: str
    gpus: int = 1
    checkpointing: str = "none"
    compiled: bool = False
    parallel: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        split = " ".join(f"{key}={value}" for key, value in self.parallel.items())
        compiled = ", compiled" if self.compiled else ""
        return f"{self.model}{' ' if split else ''}{split}, {self.checkpointing}{compiled}"


def cases(models: list[str], gpus: int) -> Iterator[Case]:
    for model in models:
        for checkpointing in ("none", "selective", "every_k", "full"):
            yield Case(model, 1, checkpointing)
        for checkpointing in ("none", "selective", "full"):
            yield Case(model, 1, checkpointing, compiled=True)
        if gpus > 1:
            for axis in ("dp_shard", "tp", "cp"):
                yield Case(model, gpus, "selective", parallel={axis: gpus})
            yield Case(model, gpus, "selective", compiled=True, parallel={"dp_shard": gpus})


def tiny_cases() -> Iterator[Case]:
    yield Case("tiny")
    yield Case("tiny", checkpointing="full")
    yield Case("tiny", 2, parallel={"dp_shard": 2})
    yield Case("tiny", 2, parallel={"cp": 2})


def spec_of(case: Case, sequence_length: int) -> JobSpec:
    micro = MICRO_BATCH[case.model]
    spread = case.parallel.get("dp_shard", 1)
    degrees = {"dp_shard": 1, "tp": 1, **case.parallel}
    return decode(
        JobSpec,
        {
            "name": "gpu",
            "model": {"config": MODELS[case.model]},
            "data": {"files": "{stdlib}/*.py", "sequence_length": sequence_length},
            "train": {
                "steps": 1_000_000,
                "global_batch_size": micro * spread,
                "micro_batch_size": micro,
                "dtype": "bfloat16",
                "activation_checkpointing": case.checkpointing,
                "compile": case.compiled,
            },
            "parallel": degrees,
            "cluster": {"hosts": 1, "gpus_per_host": case.gpus},
            "checkpoint": {"every_steps": 1_000_000},
        },
    )


def main(chosen: list[Case], steps: int, sequence_length: int) -> int:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(f"{machine()}, {device}, sequences of {sequence_length} tokens")
    print(
        "| case | tokens/s | MFU | planned / measured speed | peak memory"
        " | planned / measured memory |"
    )
    print("|---|---|---|---|---|---|")
    done = 0
    for case in chosen:
        row = run(case, steps, sequence_length)
        done += not row.startswith("failed")
        print(f"| {case.name} | {row} |", flush=True)
    return 0 if done else 1


def run(case: Case, steps: int, sequence_length: int) -> str:
    """The row of `case`: the median over the steps after the warm-up, or why it failed."""
    spec = spec_of(case, sequence_length)
    planned = plan(spec, inventory_of(case), MODELS[case.model])
    with tempfile.TemporaryDirectory() as folder:
        config = trainer_config(spec, planned, MODELS[case.model], folder)
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(encode(config)))
        error = train(path, case.gpus, steps)
        lines = metrics_of(Path(folder))[WARM_UP:]
    memory = planned.needs
    # torch's figure is the allocator's, which knows nothing of the rest.
    tensors = memory.peak_bytes - sum(memory.items.get(item, 0) for item in RESERVE)
    return f"{error} | | | |" if error else show(lines, tensors, planned.time)


def inventory_of(case: Case) -> Inventory:
    """This machine, with as many of its devices as the case has ranks."""
    (host,) = this_machine(os.environ).hosts
    return Inventory(hosts=(replace(host, devices=case.gpus),))


def train(config: Path, gpus: int, steps: int) -> str:
    """Train until `steps` steps are measured; what went wrong, or nothing.

    The run is killed then: it has more steps to do, so that no checkpoint is written.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={gpus}", "-m", "trainer", str(config)]
    log = config.with_name("log")
    with log.open("w") as file:
        ranks = subprocess.Popen(command, stdout=file, stderr=file, text=True)
    deadline = time.monotonic() + LIMIT_S
    try:
        while len(metrics_of(config.parent)) < steps:
            if ranks.poll() is not None:
                return f"failed: {reason(log.read_text())}"
            if time.monotonic() > deadline:
                return f"failed: not done in {LIMIT_S:.0f} s"
            time.sleep(0.5)
    finally:
        kill(ranks)
    return ""


def kill(torchrun: subprocess.Popen[str]) -> None:
    """End torchrun and its ranks, each of which leads a session of its own."""
    tasks = Path(f"/proc/{torchrun.pid}/task").glob("*/children")
    ranks = [int(pid) for children in tasks for pid in children.read_text().split()]
    for pid in (torchrun.pid, *ranks):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    torchrun.wait()


def reason(log: str) -> str:
    """The last error in the log of a run, in one line."""
    errors = [line.strip() for line in log.splitlines() if "Error" in line or "error:" in line]
    return (errors[-1] if errors else "no reason given")[:120].replace("|", "/")


def show(lines: list[dict[str, Any]], planned_bytes: int, planned: StepTime | None) -> str:
    rate = statistics.median(line["tokens_per_second"] for line in lines)
    step_s = statistics.median(line["step_s"] for line in lines)
    mfus = [line["mfu"] for line in lines if line["mfu"] is not None]
    mfu = f"{statistics.median(mfus):.1%}" if mfus else "not known"
    speed = f"{step_s / planned.step_s:.2f}" if planned else "not planned"
    peak = max(line["peak_memory_bytes"] for line in lines)
    return (
        f"{rate:.0f} | {mfu} | {speed} | {show_bytes(peak)} | {planned_bytes / peak:.2f} "
        f"({show_bytes(planned_bytes)})"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="What GPUs show.")
    parser.add_argument("--models", nargs="+", choices=("1b", "3b"), default=["1b", "3b"])
    parser.add_argument("--steps", type=int, default=20, help="measured ones, after the warm-up")
    parser.add_argument("--sequence-length", type=int, default=2048)
    parser.add_argument("--tiny", action="store_true", help="a tiny model, also on CPU")
    asked = parser.parse_args()
    tiny = asked.tiny
    if not tiny and not torch.cuda.is_available():
        sys.exit("no CUDA GPU is here; --tiny runs the same way on CPU")
    chosen = tiny_cases() if tiny else cases(asked.models, torch.cuda.device_count())
    # So that no ranks are left when the benchmark is ended.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    sys.exit(main(list(chosen), asked.steps + WARM_UP, 128 if tiny else asked.sequence_length))
