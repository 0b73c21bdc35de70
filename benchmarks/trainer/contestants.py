"""One rank of `python -m benchmarks.trainer`: every contestant, a few steps each in turn."""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from accelerate import Accelerator, DistributedDataParallelKwargs, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DistributedType
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.traced.allocations import Allocations
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
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 1024,
}
BATCH, LENGTH = 4, 256
LR, CLIP = 3e-4, 1.0

Step = Callable[[int], tuple[float, float]]
"""Trains step n, from 1; its loss and gradient norm."""


@dataclass(frozen=True, slots=True)
class Entrant:
    name: str
    build: Callable[[], Step]


def ours(
    folder: Path, name: str, parallel: dict[str, Any], env: RankEnv, *, asynchronous: bool = True
) -> Step:
    """The bundled trainer. Not `asynchronous`: FSDP gathers as on a GPU, where torch ignores the
    private switch that makes gloo's all-gathers overlap."""
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
    with nullcontext() if asynchronous else patch.object(FSDPModule, "_set_unshard_async_op"):
        job, _ = assemble(arrange(config.mesh, env), config, runtime)

    def step(number: int) -> tuple[float, float]:
        totals = job.stepper.run(number, LR, stop)
        return totals.loss, totals.grad_norm

    return step


def accelerate(
    plugin: FullyShardedDataParallelPlugin | None,
    batches: list[torch.Tensor],
    *,
    tuned: bool = False,
) -> Step:
    """Accelerate's documented loop, with FSDP2 as `plugin` says or else DDP. `tuned`: with the
    settings that ours has, which its user would have to know."""
    # One process holds several of them, which share their state unless it is reset.
    AcceleratorState._reset_state()
    GradientState._reset_state()
    views = DistributedDataParallelKwargs(gradient_as_bucket_view=True, static_graph=True)
    handlers: list[Any] = [views] if tuned and plugin is None else []
    accelerator = Accelerator(cpu=True, kwargs_handlers=handlers)
    if plugin:
        # By itself it takes FSDP for accelerators alone; the code behind works on CPU as well.
        accelerator.state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = plugin
    model = llama()
    model, optimizer = accelerator.prepare(model, adamw(model))
    if tuned and plugin:
        overlap(model, keep_last=plugin.reshard_after_forward is True)

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


def by_hand(batches: list[torch.Tensor], *, sharded: bool) -> Step:
    """The loop of somebody who needs no library: torch's FSDP2 or DDP with the best settings."""
    model = llama()
    if sharded:
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
        overlap(model, keep_last=True)
    else:
        model = DistributedDataParallel(model, gradient_as_bucket_view=True, static_graph=True)
    optimizer = adamw(model)

    def step(number: int) -> tuple[float, float]:
        tokens_BT = batches[number % len(batches)]
        loss = model(input_ids=tokens_BT, labels=tokens_BT).loss
        loss.backward()
        norm: Any = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        norm = norm.full_tensor() if sharded else norm
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / dist.get_world_size()
        dist.all_reduce(mean)
        return float(mean), float(norm)

    return step


def llama() -> Any:
    torch.manual_seed(0)
    values = {key: value for key, value in MODEL.items() if key != "model_type"}
    config = AutoConfig.for_model("llama", **values, use_cache=False)
    build: Any = AutoModelForCausalLM.from_config
    return build(config, attn_implementation="sdpa").train()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )


def overlap(model: Any, *, keep_last: bool) -> None:
    """What ours does with FSDP2: the next layer is gathered while one computes, on gloo without
    waiting, and what the backward pass needs first stays gathered."""
    layers: Sequence[FSDPModule] = list(model.model.layers)
    model.set_reshard_after_forward(False, recurse=False)
    if keep_last:
        layers[-1].set_reshard_after_forward(False, recurse=False)
    for layer, following in pairwise(layers):
        layer.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([layer])
    model._set_unshard_async_op(True)


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


def entrants(folder: Path, env: RankEnv) -> Iterator[Entrant]:
    data = ready_made(env.rank)
    keep = {"reshard_after_forward": False}
    shard, copies = {"dp_shard": 2}, {"dp_replicate": 2, "dp_shard": 1, "data": "ddp"}
    yield Entrant("fsdp", lambda: ours(folder, "fsdp", shard, env))
    yield Entrant(
        "fsdp, gathers as on a GPU", lambda: ours(folder, "gpu", shard, env, asynchronous=False)
    )
    yield Entrant(
        "fsdp without reshard", lambda: ours(folder, "keep", {**shard, "fsdp": keep}, env)
    )
    yield Entrant("ddp", lambda: ours(folder, "ddp", copies, env))
    yield Entrant("accelerate fsdp2", lambda: accelerate(fsdp2(True), data))
    yield Entrant("accelerate fsdp2, tuned", lambda: accelerate(fsdp2(True), data, tuned=True))
    yield Entrant(
        "accelerate fsdp2 without reshard, tuned",
        lambda: accelerate(fsdp2(False), data, tuned=True),
    )
    yield Entrant("fsdp2 by hand", lambda: by_hand(data, sharded=True))
    yield Entrant("accelerate ddp", lambda: accelerate(None, data))
    yield Entrant("accelerate ddp, tuned", lambda: accelerate(None, data, tuned=True))
    yield Entrant("ddp by hand", lambda: by_hand(data, sharded=False))


def main(folder: Path, alternations: int, steps: int) -> None:
    env = RankEnv.from_mapping(os.environ)
    with process_group(env):
        steppers: dict[str, Step] = {}
        peaks: dict[str, int] = {}
        for entrant in entrants(folder, env):
            steppers[entrant.name], peaks[entrant.name] = built(entrant)
        done = dict.fromkeys(steppers, WARM_UP + 1)
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
            (folder / "result.json").write_text(json.dumps({"rates": rates, "peaks": peaks}))


WARM_UP = 2
"""Steps before the optimizer's state exists and DDP has made its final buckets."""


def built(entrant: Entrant) -> tuple[Step, int]:
    """A contestant after its warm-up and one further step, and the most bytes of tensors that it
    held in that step: weights, gradients, optimizer state and activations."""
    with Allocations() as allocations:
        step = entrant.build()
        for number in range(1, WARM_UP + 1):
            step(number)
        allocations.peak = allocations.now
        step(WARM_UP + 1)
        return step, allocations.peak


def timed(step: Step, done: int, steps: int) -> float:
    dist.barrier()
    begun = time.perf_counter()
    for number in range(done + 1, done + steps + 1):
        step(number)
    dist.barrier()
    return time.perf_counter() - begun


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
