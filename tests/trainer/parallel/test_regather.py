"""Mode `gathers`: under tensor parallel, layers keep a rank's part of what they gather."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy

from benchmarks.traced.step import fake_world
from orchestrator.contract.spec.model_spec import LoraSpec, ModelSpec
from orchestrator.contract.spec.train_spec import Checkpointing
from tests.trainer.launch.tiny_runs import LLAMA
from tests.trainer.model.test_float8 import config_of
from tests.trainer.parallel.test_activation import Operations
from tests.trainer.parallel.test_compile import stored_bytes
from trainer.model.adapters import add_adapters
from trainer.model.build import build_stages, read_model_config
from trainer.model.decoder import Decoder, StageSlice
from trainer.model.float8 import convert
from trainer.model.init_weights import allocate
from trainer.model.sequence import gather_sequence
from trainer.parallel.activation import apply_activation_checkpointing
from trainer.parallel.compile import compile_layers
from trainer.parallel.tensor import Gathering, apply_tensor_parallel, gathers_again

TP, BATCH, TOKENS = 4, 2, 32
"""Tokens of a sequence on all tp ranks together."""
LAYERS, GATHERS = 3, 2
"""Gathers of a layer: before attention and before the MLP."""
KINDS = {
    **LLAMA,
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": 4,
    "hidden_size": 64,  # float8 needs multiples of 16 on each rank
}
GATHER = {torch.ops._c10d_functional.all_gather_into_tensor.default}


@pytest.fixture
def ranks() -> Iterator[None]:
    """One rank of a fake process group, whose collectives do nothing."""
    with fake_world(TP, 0):
        yield


def build(
    mode: Checkpointing = "gathers", targets: tuple[str, ...] = (), *, float8: bool = False
) -> Decoder:
    config = read_model_config(ModelSpec(config=KINDS))
    (decoder,) = build_stages(config, [StageSlice(0, LAYERS, LAYERS)])
    if float8:
        convert(decoder, config_of(KINDS, tp=TP), emulate=True)
    if targets:
        add_adapters(decoder, LoraSpec(rank=2, target_modules=targets))
    apply_tensor_parallel(decoder, init_device_mesh("cpu", (TP,), mesh_dim_names=("tp",))["tp"])
    apply_activation_checkpointing(decoder, mode, None, TP)
    return decoder


def fill(decoder: Decoder) -> None:
    allocate(decoder, torch.device("cpu"))
    for parameter in decoder.parameters():
        nn.init.constant_(parameter, 0.01)
    decoder.set_positions(torch.arange(TOKENS).unsqueeze(0))


def passes(decoder: Decoder) -> tuple[int, int, int]:
    """Bytes alive after the forward pass; gathers in the forward and in the backward pass."""
    fill(decoder)
    ids = torch.zeros(BATCH, TOKENS, dtype=torch.long)
    with Operations() as operations:
        total = decoder(ids).sum()
        kept, forward = operations.bytes_alive(), operations.num(GATHER)
        total.backward()
        return kept, forward, operations.num(GATHER) - forward


@pytest.mark.usefixtures("ranks")
@pytest.mark.parametrize("float8", [False, True])
def test_only_a_ranks_part_of_gathered_inputs_is_kept(float8: bool) -> None:
    most, forward, backward = passes(build("none", float8=float8))
    kept, forward_again, backward_again = passes(build(float8=float8))
    values = BATCH * TOKENS * KINDS["hidden_size"]
    assert most - kept == LAYERS * GATHERS * 4 * values * (TP - 1) / TP
    assert forward_again == forward
    # Once per gather, although queries, keys and values need it, and gate and up.
    assert backward_again == backward + LAYERS * GATHERS


@pytest.mark.usefixtures("ranks")
@pytest.mark.parametrize(
    ("targets", "again"),
    [(("q_proj", "v_proj"), 1), (("gate_proj",), 1), (("k_proj", "up_proj"), 2), (("o_proj",), 0)],
)
def test_with_adapters_only_what_they_need_is_gathered_again(
    targets: tuple[str, ...], again: int
) -> None:
    _, _, gathers = passes(build(targets=targets))
    _, _, without = passes(build("none", targets))
    assert gathers == without + LAYERS * again


class Kept(TorchDispatchMode):
    """The results that a region which recomputes its gathers keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.decide, self.ops = gathers_again(), list[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # torch.compile decomposes it.
        seen = torch.ops.aten.split.Tensor if func is torch.ops.aten.chunk.default else func
        if self.decide(None, seen) is not CheckpointPolicy.MUST_RECOMPUTE:
            self.ops.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.usefixtures("ranks")
@pytest.mark.parametrize("sequences", [1, 2])
def test_nothing_of_a_gather_is_kept_by_compiled_layers(sequences: int) -> None:
    """The result of putting the parts of several sequences together is as large as the gather."""
    mlp = next(module for module in build().modules() if isinstance(module, Gathering))
    part = torch.zeros(sequences, TOKENS // TP, KINDS["hidden_size"])
    with Kept() as kept:
        whole = gather_sequence(part, mlp.tensor_ranks)
        assert kept.ops == []
        torch.mm(whole[0], whole[0].T)
    assert "aten.mm.default" in kept.ops


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("ranks")
@pytest.mark.filterwarnings("ignore")
def test_compiled_layers_keep_the_part_too() -> None:
    kept = {}
    modes: tuple[Checkpointing, ...] = ("none", "gathers")
    for mode in modes:
        torch._dynamo.reset()
        decoder = build(mode)
        compile_layers(decoder)
        fill(decoder)
        kept[mode] = stored_bytes(decoder, torch.zeros(BATCH, TOKENS, dtype=torch.long))
    values = BATCH * TOKENS * KINDS["hidden_size"]
    assert kept["none"] - kept["gathers"] >= LAYERS * GATHERS * 4 * values * (TP - 1) / TP * 0.9
