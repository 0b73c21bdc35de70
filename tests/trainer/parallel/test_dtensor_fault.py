"""Faults of torch that the trainer is built around. A test fails when torch has fixed one."""

from typing import Any, Literal

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
from torch.profiler import ProfilerActivity, profile

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


Compiled = Literal["nothing", "layer", "wrapper"]


def recompute_layer(compiled: Compiled) -> int:
    """A step with one layer, whose checkpoint wrapper recomputes it; the reduce-scatters of the
    step."""
    decoder = build({**LLAMA, "num_hidden_layers": 1})
    with fake_world(2, 0):
        apply_tensor_parallel(decoder, init_device_mesh("cpu", (2,)))
        apply_activation_checkpointing(decoder, "full", None)
        wrapper: Any = decoder.layers["0"]
        if compiled != "nothing":
            inner = wrapper if compiled == "wrapper" else wrapper._checkpoint_wrapped_module
            inner.compile(backend="aot_eager")
        materialise(decoder, 0)
        decoder.set_positions(torch.arange(8).unsqueeze(0))
        ids = torch.zeros(2, 8, dtype=torch.long)
        decoder(ids).sum().backward()  # compiles
        # Not with a TorchDispatchMode, under which Dynamo compiles nothing.
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            decoder(ids).sum().backward()
    names = [event.name for event in seen.events()]
    return names.count("_c10d_functional::reduce_scatter_tensor")


@pytest.mark.filterwarnings("ignore")
def test_torch_cannot_compile_the_recomputation_of_a_layer_with_dtensor_weights() -> None:
    """torch 2.13 stores the random state of a recomputed attention behind the mesh of the weights,
    where it looks for the mesh: `functionalize_rng_ops` in `torch/_functorch/partitioners.py` does
    not count such objects. On a GPU that state may be no output, which has not been tried.

    If this test fails, torch may have fixed it: then `compile_layers` needs no
    `inside_checkpoints`, and the planner no `Setup.compiles_recomputation`."""
    # The layer's last reduce-scatter, which no gradient needs.
    assert recompute_layer("layer") == recompute_layer("nothing") + 1
    with pytest.raises(AssertionError, match=r"to be Tensors, got types: .*DeviceMesh"):
        recompute_layer("wrapper")
