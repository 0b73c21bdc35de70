"""One rank of `benchmarks/trainer.py`: every contestant, a few steps each in turn."""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DistributedType
from transformers import AutoConfig, AutoModelForCausalLM

from orchestrator.contract.codec import decode
from orchestrator.contract.files.env import RankEnv
from orchestrator.contract.files.trainer_config import TrainingConfig
from trainer.config import complete
from trainer.main import assemble
from trainer.rank.ranks import arrange, process_group
from trainer.rank.reporter import Reporter
from trainer.rank.runtime import Runtime
from trainer.rank.signals import StopRequest

MODEL: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 1024,
}
BATCH, LENGTH = 8, 128
LR, CLIP = 3e-4, 1.0

Step = Callable[[int], tuple[float, float]]
"""Trains step n, from 1; its loss and gradient norm."""


def ours(folder: Path, name: str, parallel: dict[str, Any], env: RankEnv) -> Step:
    config: TrainingConfig = decode(
        TrainingConfig,
        {
            "model": {"config": MODEL},
            "data": {"files": "{stdlib}/*.py", "sequence_length": LENGTH},
            "parallel": {"tp": 1, **parallel},
            "micro_batch_size": BATCH // env.world_size,
            "train": {
                "steps": 10_000,
                "global_batch_size": BATCH,
                "grad_clip": CLIP,
                "optimizer": {"lr": LR},
                "schedule": {"kind": "constant"},
            },
            "out": str(folder / name),
        },
    )
    config = complete(config, env.world_size)
    stop = StopRequest()
    runtime = Runtime(env=env, reporter=Reporter(env), drills=(), stop=stop, clock=time.time)
    job, _ = assemble(arrange(config.mesh, env), config, runtime)

    def step(number: int) -> tuple[float, float]:
        totals = job.stepper.run(number, LR, stop)
        return totals.loss, totals.grad_norm

    return step


def theirs(plugin: FullyShardedDataParallelPlugin | None, batches: list[torch.Tensor]) -> Step:
    """Accelerate's documented loop, with FSDP2 as `plugin` says or else DDP."""
    # One process holds several of them, which share their state unless it is reset.
    AcceleratorState._reset_state()
    GradientState._reset_state()
    accelerator = Accelerator(cpu=True)
    if plugin:
        # By itself it takes FSDP for accelerators alone; the code behind works on CPU as well.
        accelerator.state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = plugin
    torch.manual_seed(0)
    values = {key: value for key, value in MODEL.items() if key != "model_type"}
    config = AutoConfig.for_model("llama", **values, use_cache=False)
    build: Any = AutoModelForCausalLM.from_config
    model = build(config, attn_implementation="sdpa").train()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    model, optimizer = accelerator.prepare(model, optimizer)

    def step(number: int) -> tuple[float, float]:
        tokens_BT = batches[number % len(batches)]
        loss = model(input_ids=tokens_BT, labels=tokens_BT).loss
        accelerator.backward(loss)
        norm: Any = accelerator.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        mean: Any = accelerator.reduce(loss.detach(), reduction="mean")
        return float(mean), float(norm)

    return step


def fsdp2(reshard: bool) -> FullyShardedDataParallelPlugin:
    return FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=reshard,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
    )


def ready_made(rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    shape = (BATCH // dist.get_world_size(), LENGTH)
    return [torch.randint(0, 256, shape, generator=generator) for _ in range(16)]


def contestants(folder: Path, env: RankEnv) -> Iterator[tuple[str, Step]]:
    data = ready_made(env.rank)
    plain = {"forward_prefetch": 0, "backward_prefetch": 0}
    keep = {"reshard_after_forward": False}
    yield "fsdp", ours(folder, "fsdp", {"dp_shard": 2}, env)
    yield "fsdp, prefetch off", ours(folder, "plain", {"dp_shard": 2, "fsdp": plain}, env)
    yield "fsdp without reshard", ours(folder, "keep", {"dp_shard": 2, "fsdp": keep}, env)
    yield "ddp", ours(folder, "ddp", {"dp_replicate": 2, "dp_shard": 1, "data": "ddp"}, env)
    yield "accelerate fsdp2", theirs(fsdp2(True), data)
    yield "accelerate fsdp2 without reshard", theirs(fsdp2(False), data)
    yield "accelerate ddp", theirs(None, data)


def main(folder: Path, alternations: int, steps: int) -> None:
    env = RankEnv.from_mapping(os.environ)
    with process_group(env):
        steppers = dict(contestants(folder, env))
        done = dict.fromkeys(steppers, 0)
        rates: dict[str, list[float]] = {name: [] for name in steppers}
        for turn in range(-1, alternations):
            names = list(steppers)
            at = turn % len(names)
            for name in names[at:] + names[:at]:
                taken = timed(steppers[name], done[name], steps)
                done[name] += steps
                # The first turn warms up.
                if turn >= 0:
                    rates[name].append(steps * BATCH * LENGTH / taken)
        if env.rank == 0:
            (folder / "rates.json").write_text(json.dumps(rates))


def timed(step: Step, done: int, steps: int) -> float:
    dist.barrier()
    begun = time.perf_counter()
    for number in range(done + 1, done + steps + 1):
        step(number)
    dist.barrier()
    return time.perf_counter() - begun


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
