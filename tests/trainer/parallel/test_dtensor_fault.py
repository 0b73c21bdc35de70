"""Faults of torch that the trainer is built around. A test fails when torch has fixed one."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from benchmarks.traced.step import fake_world
from tests.trainer.launch.tiny_runs import LLAMA
from tests.trainer.model.test_build import build, materialise
from trainer.parallel.activation import apply_activation_checkpointing
from trainer.parallel.tensor import apply_tensor_parallel


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(8)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, hidden_BTD: torch.Tensor) -> torch.Tensor:
        out_BTD: torch.Tensor = hidden_BTD + self.down(self.up(self.norm(hidden_BTD)))
        return out_BTD


def train_with_dtensors(compiled: bool) -> None:
    """A step of an embedding and a block with the styles of torch's tensor parallel. The embedding
    returns a tensor whose collective is not waited for yet."""
    embedding, block = nn.Embedding(16, 8), Block()
    with fake_world(2, 0):
        mesh = init_device_mesh("cpu", (2,))
        to_rows = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
        parallelize_module(embedding, mesh, to_rows)
        plan = {
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1)),
        }
        parallelize_module(block, mesh, plan)
        if compiled:
            block.compile(backend="aot_eager")
        block(embedding(torch.zeros(2, 8, dtype=torch.long))).sum().backward()
    assert all(parameter.grad is not None for parameter in block.parameters())


@pytest.mark.filterwarnings("ignore")
def test_torch_cannot_compile_a_layer_of_dtensors() -> None:
    """torch 2.13's AOTAutograd. If this test fails, torch may have fixed it: then `PlainWeights`
    in `trainer/parallel/tensor.py` is needed for speed only."""
    train_with_dtensors(compiled=False)
    with pytest.raises(AttributeError, match="'Tensor' object has no attribute '_local_tensor'"):
        train_with_dtensors(compiled=True)


def recompute_layer(*, compile_wrapper: bool) -> None:
    decoder = build({**LLAMA, "num_hidden_layers": 1})
    with fake_world(2, 0):
        apply_tensor_parallel(decoder, init_device_mesh("cpu", (2,)))
        apply_activation_checkpointing(decoder, "full", None)
        wrapper: Any = decoder.layers["0"]
        (wrapper if compile_wrapper else wrapper._checkpoint_wrapped_module).compile(
            backend="aot_eager"
        )
        materialise(decoder, 0)
        decoder.set_positions(torch.arange(8).unsqueeze(0))
        decoder(torch.zeros(2, 8, dtype=torch.long)).sum().backward()


@pytest.mark.filterwarnings("ignore")
def test_torch_cannot_compile_the_recomputation_of_a_layer_with_dtensor_weights() -> None:
    """torch 2.13. If this test fails, torch may have fixed it: then `compile_layers` needs no
    `inside_checkpoints`."""
    recompute_layer(compile_wrapper=False)
    with pytest.raises(AssertionError, match=r"to be Tensors, got types: .*DeviceMesh"):
        recompute_layer(compile_wrapper=True)
