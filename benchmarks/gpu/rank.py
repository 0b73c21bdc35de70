"""One rank of `python -m benchmarks.gpu`: the bundled trainer runs a few steps of each case."""

import gc
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from msgspec.structs import replace
from torch.profiler import ProfilerActivity, profile

from orchestrator.agent.memory.slots import MemorySlots
from orchestrator.contract.codec import decode, encode
from orchestrator.contract.files.env import RankEnv
from orchestrator.contract.files.trainer_config import TrainingConfig
from orchestrator.contract.memory.peers import CopyPlan
from orchestrator.contract.messages.agent_protocol import Start
from trainer.config import complete
from trainer.loop import Training
from trainer.main import assemble
from trainer.rank.determinism import make_deterministic
from trainer.rank.environment import DRIVER, gpu_defaults, torch_defaults
from trainer.rank.ranks import arrange, peak_memory_bytes, process_group
from trainer.rank.reporter import Reporter
from trainer.rank.runtime import Runtime
from trainer.rank.signals import StopRequest
from trainer.step import NO_NEWS

WARM_UP = 3
"""Steps, the compilation included."""
LR = 1e-4


def main(folder: Path) -> None:
    env = RankEnv.from_mapping(os.environ)
    defaults = {**torch_defaults(env), **gpu_defaults(os.environ, gpu=DRIVER.exists())}
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    asked = json.loads((folder / "cases.json").read_text())
    with process_group(env), (folder / "rows.jsonl").open("a", buffering=1) as rows:
        for case in asked["cases"]:
            try:
                row = measured(case, asked["steps"], env)
            except Exception as exc:
                if env.world_size > 1:
                    # The other ranks wait for this one, so torchrun must end them.
                    raise
                text = str(exc).partition("\n")[0][:120].replace("|", "/")
                row = {"error": f"failed: {type(exc).__name__}: {text}"}
            if env.rank == 0:
                rows.write(json.dumps(row) + "\n")
            free()


def measured(case: dict[str, Any], steps: int, env: RankEnv) -> dict[str, Any]:
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    with TemporaryDirectory() as out:
        config = complete(decode(TrainingConfig, {**case["config"], "out": out}), env.world_size)
        if config.train.deterministic:
            make_deterministic()
        stop = StopRequest()
        with host_memory(env) as given:
            runtime = Runtime(
                env=given, reporter=Reporter(given), drills=(), stop=stop, clock=time.time
            )
            job, _ = assemble(arrange(config.mesh, given), config, runtime)
            numbers = count(1)
            with runtime.on_leave, job.stepper.batches:
                for _ in range(WARM_UP):
                    timed(job, next(numbers), stop)
                step_s = [timed(job, next(numbers), stop) for _ in range(steps)]
                peak = peak_memory_bytes(job.ranks.device)
                with recorded(case["trace"] if env.rank == 0 else None) as attention:
                    timed(job, next(numbers), stop)
            if job.records is not None:
                job.records.close()
    memory = job.memory
    return {
        "copied_step": None if memory is None else memory.done,
        "step_s": step_s,
        "tokens": job.stepper.tokens_per_step,
        "peak_tokens_per_second": job.peak_tokens_per_second,
        "peak_memory_bytes": peak,
        "attention": attention,
    }


@contextmanager
def host_memory(env: RankEnv) -> Iterator[RankEnv]:
    """`env` with room for checkpoints in memory, as an agent gives it to its ranks."""
    start = Start(
        attempt=1,
        node_rank=0,
        nodes=1,
        ranks_per_host=env.local_world_size,
        master_address="",
        master_port=0,
        config="",
        drills=(),
        lineage=1,
    )
    with closing(MemorySlots()) as slots:
        given = encode(slots.of_attempt(start, CopyPlan()))
        yield replace(env, memory=json.dumps(given))


def timed(job: Training, number: int, stop: StopRequest) -> float:
    """Seconds of a step, with what it waits for a copy of its state into the host's memory. Its
    update may still run on the device, as that of the step before did when this one began."""
    begun, memory = time.perf_counter(), job.memory
    news = NO_NEWS if memory is None else memory.news(NO_NEWS)
    totals = job.stepper.run(number, LR, stop, news)
    if memory is not None:
        memory.after_step(time.perf_counter() - begun, totals)
        if memory.due(number):
            memory.save(number)
    return time.perf_counter() - begun


@contextmanager
def recorded(trace: str | None) -> Iterator[list[str]]:
    """Records what runs inside; the list then has the operators of attention."""
    names: list[str] = []
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as run:
        yield names
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    if trace is not None:
        run.export_chrome_trace(trace)
    used: Counter[str] = Counter()
    for event in run.key_averages():
        name = event.key.removeprefix("aten::_")
        if name.startswith("scaled_dot_product_"):
            used[name.removeprefix("scaled_dot_product_")] += event.count
    names += sorted(used)


def free() -> None:
    """Give the memory of a case back."""
    torch.compiler.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
