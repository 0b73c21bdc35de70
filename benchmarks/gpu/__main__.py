"""What GPUs show: tokens/s, MFU and peak memory, and how they compare with the planner's figures.

    python -m benchmarks.gpu [--budget 480] [--models 1b 3b] [--out DIR] [--tiny]

1B and 3B Llama in bfloat16 on one CUDA GPU: kinds of activation checkpointing, torch.compile,
float8, the loss in one chunk and in several, micro batches, deterministic kernels, and a copy of
the state into the host's memory after each step. Given two or more GPUs, FSDP, tensor and context
parallel over them as well. The most important cases come first, and no case begins when the budget
(in seconds) is used up.

Cases run one after another in one process (`benchmarks/gpu/rank.py`), so that imports cost once. A
case that fails or takes too long costs its row, and the process if that is needed. `--out` keeps
the rows as JSON and a trace of each model for Perfetto. `--tiny` runs a tiny model the same way on
a CPU.
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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace

from benchmarks.measure.timing import machine
from orchestrator.contract.codec import decode, encode
from orchestrator.contract.plan import Plan
from orchestrator.contract.spec.job_spec import JobSpec
from orchestrator.contract.spec.model_presets import PRESETS
from orchestrator.errors import NdctlError
from orchestrator.inventory.hosts import Inventory
from orchestrator.inventory.local import this_machine
from orchestrator.plan.figures import show_bytes
from orchestrator.plan.planner import plan
from orchestrator.plan.training import trainer_config

CASE_LIMIT_S = 150.0
"""Without a row for so long, the process is killed and the next case begins in a new one."""
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
FULL, SELECTIVE, COMPILED = (
    {"activation_checkpointing": "full"},
    {"activation_checkpointing": "selective"},
    {"compile": True},
)


@dataclass(frozen=True, slots=True)
class Case:
    model: str
    train: Mapping[str, Any] = field(default_factory=dict)
    """Keys that are other than in the plain case, which keeps all activations."""
    parallel: Mapping[str, Any] = field(default_factory=dict)
    gpus: int = 1
    keeps_trace: bool = False
    in_memory: int | str = "off"
    """`checkpoint.memory.every`."""

    @property
    def name(self) -> str:
        changed = {**self.parallel, **self.train}
        if self.in_memory != "off":
            changed["checkpoint.memory.every"] = self.in_memory
        return " ".join([self.model, *(f"{key}={value}" for key, value in changed.items())])

    @property
    def process(self) -> tuple[int, bool]:
        """Cases share a process if this is the same: deterministic kernels are chosen once."""
        return self.gpus, bool(self.train.get("deterministic"))


def cases(models: Sequence[str], gpus: int) -> Iterator[Case]:
    """The most important ones first."""
    float8 = {**COMPILED, "float8": True}
    for model in models:
        yield Case(model, keeps_trace=True)
        yield Case(model, COMPILED, keeps_trace=True)
        yield Case(model, in_memory=1, keeps_trace=True)
        yield Case(model, FULL)
        yield Case(model, SELECTIVE)
    for model in models:
        yield Case(model, float8)
        yield Case(model, {"loss_chunks": 1})
        yield Case(model, {"micro_batch_size": 1})
        yield Case(model, {"micro_batch_size": 2 * MICRO_BATCH[model]})
        yield Case(model, {**COMPILED, **SELECTIVE})
        yield Case(model, {"dtype": "float32", "micro_batch_size": 1})
    for model in models:
        yield Case(model, {"deterministic": True})
    if gpus > 1:
        for model in models:
            for axis in ("dp_shard", "tp", "cp"):
                yield Case(model, SELECTIVE, {axis: gpus}, gpus)
            yield Case(model, {**COMPILED, **SELECTIVE}, {"dp_shard": gpus}, gpus)


def tiny_cases() -> Iterator[Case]:
    yield Case("tiny", keeps_trace=True)
    yield Case("tiny", in_memory=1)
    yield Case("tiny", FULL)
    yield Case("tiny", {"loss_chunks": 1})
    yield Case("tiny", {"micro_batch_size": 100_000})
    yield Case("tiny", {"micro_batch_size": 4})
    yield Case("tiny", {"deterministic": True})
    yield Case("tiny", {}, {"dp_shard": 2}, 2)
    yield Case("tiny", {}, {"cp": 2}, 2)


def spec_of(case: Case, sequence_length: int) -> JobSpec:
    micro = case.train.get("micro_batch_size", MICRO_BATCH[case.model])
    degrees = {"dp_shard": 1, "tp": 1, **case.parallel}
    return decode(
        JobSpec,
        {
            "name": "gpu",
            "model": {"config": MODELS[case.model]},
            "data": {"files": "{stdlib}/*.py", "sequence_length": sequence_length},
            "train": {
                "steps": 1_000_000,
                "global_batch_size": micro * degrees["dp_shard"],
                "micro_batch_size": micro,
                "dtype": "bfloat16",
                "activation_checkpointing": "none",
                **case.train,
            },
            "parallel": degrees,
            "cluster": {"hosts": 1, "gpus_per_host": case.gpus},
            "checkpoint": {
                "every_steps": 1_000_000,
                "memory": {"every": case.in_memory, "copies": 0},
            },
        },
    )


HEADER = (
    "| case | tokens/s | MFU | planned / measured speed | peak memory | planned / measured memory"
    " | attention |\n|---|---|---|---|---|---|---|"
)


@dataclass(frozen=True, slots=True)
class Work:
    """A case that has a plan."""

    case: Case
    plan: Plan
    config: dict[str, Any]
    """The trainer's, without the folder of its output."""


Row = dict[str, Any]
"""What `benchmarks/gpu/rank.py` measured, or an `error`."""


def main(chosen: Sequence[Case], steps: int, length: int, budget_s: float, out: Path) -> int:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(f"{machine()}, {device}, sequences of {length} tokens, {steps} measured steps")
    print(HEADER, flush=True)
    deadline = time.monotonic() + budget_s
    measured = 0
    with (out / "rows.jsonl").open("w") as kept:
        for case, planned, row in run(chosen, steps, length, deadline, out):
            print(f"| {case.name} | {show(row, planned)} |", flush=True)
            kept.write(json.dumps({"case": case.name, **row}) + "\n")
            measured += "error" not in row
    return 0 if measured else 1


def run(
    chosen: Sequence[Case], steps: int, length: int, deadline: float, out: Path
) -> Iterator[tuple[Case, Plan | None, Row]]:
    for _, together in groupby(chosen, key=lambda case: case.process):
        left: list[Work] = []
        for case in together:
            try:
                left.append(work_of(case, length))
            except NdctlError as exc:
                yield case, None, {"error": f"no plan: {first_line(exc.message)}"}
        while left:
            # A process that fails has at least the row of the case that failed.
            for row in rows_of(left, steps, deadline, out):
                work = left.pop(0)
                yield work.case, work.plan, row


def work_of(case: Case, length: int) -> Work:
    """Raises:
    NdctlError: it has no plan.
    """
    spec = spec_of(case, length)
    made = plan(spec, inventory_of(case), MODELS[case.model])
    config = trainer_config(spec, made, MODELS[case.model], "")
    return Work(case, made, encode(config))


def inventory_of(case: Case) -> Inventory:
    """This machine, with as many of its devices as the case has ranks."""
    (host,) = this_machine(os.environ).hosts
    return Inventory(hosts=(replace(host, devices=case.gpus),))


def rows_of(works: Sequence[Work], steps: int, deadline: float, out: Path) -> Iterator[Row]:
    """Rows of the first of `works`, from one process: until all are done or the process ended."""
    gpus, _ = works[0].case.process
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        asked = [
            {
                "name": work.case.name,
                "config": work.config,
                "trace": str(out / f"{work.case.name}.trace.json.gz")
                if work.case.keeps_trace
                else None,
            }
            for work in works
        ]
        (folder / "cases.json").write_text(json.dumps({"steps": steps, "cases": asked}))
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={gpus}", "-m", "benchmarks.gpu.rank", str(folder)]
        with (folder / "log").open("w") as log:
            # A session of its own, so that all ranks can be ended with it.
            ranks = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        try:
            yield from watched(ranks, folder, len(works), deadline)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(ranks.pid, signal.SIGKILL)
            ranks.wait()


def watched(
    ranks: subprocess.Popen[bytes], folder: Path, count: int, deadline: float
) -> Iterator[Row]:
    """Rows as the process writes them."""
    path, given, since = folder / "rows.jsonl", 0, time.monotonic()
    while given < count:
        ended, now = ranks.poll() is not None, time.monotonic()
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        for line in lines[given:]:
            if line.endswith("\n"):
                given, since = given + 1, now
                yield json.loads(line)
        if given == count:
            return
        if now > deadline:
            yield from [{"error": "not run: the budget is used up"}] * (count - given)
            return
        if now > since + CASE_LIMIT_S:
            yield {"error": f"failed: not done in {CASE_LIMIT_S:.0f} s"}
            return
        if ended:
            # The lines were read after the process was seen to have ended.
            yield {"error": f"failed: {reason((folder / 'log').read_text())}"}
            return
        time.sleep(0.1)


def reason(log: str) -> str:
    """The last error in the log of a process, in one line."""
    lines = (line.strip() for line in log.splitlines() if "ChildFailedError" not in line)
    errors = [line for line in lines if "Error" in line or "error:" in line]
    return first_line(errors[-1] if errors else "no reason given")


def first_line(text: str) -> str:
    return text.strip().partition("\n")[0][:120].replace("|", "/")


def show(row: Row, planned: Plan | None) -> str:
    if "error" in row or planned is None:
        return f"{row['error']} | | | | | |"
    step_s = statistics.median(row["step_s"])
    rate = row["tokens"] / step_s
    peak_rate = row["peak_tokens_per_second"]
    mfu = f"{rate / peak_rate:.1%}" if peak_rate else "not known"
    speed = f"{step_s / planned.time.step_s:.2f}" if planned.time else "not planned"
    # torch's figure is the allocator's, which knows nothing of the rest.
    tensors = planned.needs.tensor_bytes
    peak = row["peak_memory_bytes"]
    return (
        f"{rate:.0f} | {mfu} | {speed} | {show_bytes(peak)} | {tensors / peak:.2f}"
        f" ({show_bytes(tensors)}) | {', '.join(row['attention'])}"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="What GPUs show.")
    parser.add_argument("--models", nargs="+", choices=("1b", "3b"), default=["1b", "3b"])
    parser.add_argument("--steps", type=int, default=8, help="measured ones, after the warm-up")
    parser.add_argument("--sequence-length", type=int, default=2048)
    parser.add_argument("--budget", type=float, default=480, help="seconds for all cases")
    parser.add_argument("--out", type=Path, help="folder for rows.jsonl and traces")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, also on CPU")
    asked = parser.parse_args()
    tiny = asked.tiny
    if not tiny and not torch.cuda.is_available():
        sys.exit("no CUDA GPU is here; --tiny runs the same way on CPU")
    chosen = tiny_cases() if tiny else cases(asked.models, torch.cuda.device_count())
    folder = asked.out or Path(tempfile.mkdtemp(prefix="ndctl-gpu-"))
    folder.mkdir(parents=True, exist_ok=True)
    # So that no ranks are left when the benchmark is ended.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    length = 128 if tiny else asked.sequence_length
    sys.exit(main(list(chosen), asked.steps, length, asked.budget, folder))
