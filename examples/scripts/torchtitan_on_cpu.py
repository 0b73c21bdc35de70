"""torchtitan's own `torchtitan.train` on a small llama, without a line about ndctl.

    ndctl run --hosts 2 --gpus-per-host 2 --follow -- examples/scripts/torchtitan_on_cpu.py
    torchrun --nproc-per-node 2 examples/scripts/torchtitan_on_cpu.py

With GPUs, the same is

    ndctl run --hosts 2 --gpus-per-host 8 -- -m torchtitan.train --module llama3 --config llama3_8b

In ranks that ndctl starts, the Trainer reports steps, metrics and checkpoints. It saves a
checkpoint and stops when the job is preempted or cancelled. This file is for a machine without a
GPU: it gives torchtitan's Trainer a small model, operations that the CPU has, and local text.
"""

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import cpu_for_torchtitan  # noqa: F401 (before the Trainer)
import torch
from byte_model import batch_of, read_text
from torch.distributed.fsdp import FSDPModule
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import DebugConfig, ParallelismConfig, TrainingConfig
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import model_registry, parallelize_llama
from torchtitan.train import main
from torchtitan.trainer import Trainer


class Tokenizer(BaseTokenizer):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, *, tokenizer_path: str) -> None:
        super().__init__()

    def encode(self, text: str) -> list[int]:
        return [*text.encode()]

    def decode(self, tokens: list[int]) -> str:
        return bytes(tokens).decode()

    def get_vocab_size(self) -> int:
        return 256


class Text(BaseDataLoader):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pause: float = 0.0

    def __init__(self, config: Config, *, dp_rank: int, seq_len: int, **more: Any) -> None:
        self.pause, self.rank, self.length = config.pause, dp_rank, seq_len
        self.text, self.step = read_text(), 0

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            self.step += 1
            time.sleep(self.pause)
            tokens = batch_of(self.text, self.step, self.rank, length=self.length)
            inputs, labels = tokens[:, :-1], tokens[:, 1:]
            positions = torch.arange(self.length).expand_as(inputs)
            yield {"input": inputs, "positions": positions}, labels.contiguous()

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]


def parallelize(model: Any, **more: Any) -> Any:
    """torchtitan's own, with sums that gloo has."""
    parallel = parallelize_llama(model, **more)
    for module in parallel.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
    return parallel


def small() -> Trainer.Config:
    """torchtitan's debug model with two layers. FlexAttention has no backward pass on the CPU."""
    spec = replace(model_registry("debugmodel"), parallelize_fn=parallelize)
    del spec.model.layers[2:]
    for layer in spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    return Trainer.Config(
        model_spec=spec,
        loss=CrossEntropyLoss.Config(global_vocab_size=2048),
        optimizer=default_adamw(lr=8e-4),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2),
        training=TrainingConfig(local_batch_size=8, seq_len=64, disable_cuda_graphs=True),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor"),
        tokenizer=Tokenizer.Config(),
        dataloader=Text.Config(),
        metrics=MetricsProcessor.Config(log_freq=1),
        checkpoint=CheckpointManager.Config(enable=True, last_save_model_only=False),
        debug=DebugConfig(seed=1),
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=20)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds per step, to watch it")
    args, others = parser.parse_known_args()
    sys.modules["torchtitan_on_cpu"] = sys.modules["__main__"]
    sys.argv[1:] = [
        *("--module", "torchtitan_on_cpu", "--config", "small"),
        *("--training.steps", str(args.steps), "--checkpoint.interval", str(args.save_every)),
        *("--dataloader.pause", str(args.pause), *others),
    ]
    main()
