"""Activation checkpointing: which layers recompute, and what is kept for the backward pass."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from orchestrator.contract.spec.model_spec import LoraSpec, ModelSpec
from orchestrator.contract.spec.train_spec import Checkpointing, repeated_products, stored_products
from tests.trainer.launch.tiny_runs import LLAMA
from trainer.model.adapters import add_adapters, draw_adapters
from trainer.model.build import build_stages, read_model_config
from trainer.model.decoder import Decoder, StageSlice
from trainer.model.init_weights import allocate
from trainer.model.weights import first_weights
from trainer.parallel.activation import (
    PRODUCTS,
    STORED,
    apply_activation_checkpointing,
    layers_to_wrap,
)

TOKENS = 32
GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 256}


class Operations(TorchDispatchMode):
    """Records every operation, and the storage of every tensor that an operation created."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: list[Any] = []
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ran.append(func)
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self._made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return result

    def bytes_alive(self) -> int:
        gc.collect()
        return sum(size for storage, size in self._made.values() if not storage.expired())

    def num(self, operations: set[Any]) -> int:
        return sum(ran in operations for ran in self.ran)


@contextmanager
def after_forward(
    mode: Checkpointing,
    config: dict[str, Any] = LLAMA,
    every: int | None = None,
    rank: int | None = None,
) -> Iterator[tuple[torch.Tensor, Operations]]:
    """Run a forward pass; the sum of the logits, and the recorded operations. `rank` is that of
    adapters of the query and value projections."""
    decoder = build(config)
    if rank is not None:
        add_adapters(decoder, LoraSpec(rank=rank))
    apply_activation_checkpointing(decoder, mode, every)
    allocate(decoder, torch.device("cpu"))
    first_weights([decoder], None, 0, resumed=False)
    draw_adapters(decoder, 0)
    decoder.set_positions(torch.arange(TOKENS).unsqueeze(0))
    ids_BT = torch.arange(2 * TOKENS).view(2, TOKENS)
    with Operations() as operations:
        total = decoder(ids_BT).sum()
        yield total, operations


def build(config: dict[str, Any]) -> Decoder:
    values = read_model_config(ModelSpec(config=config))
    layers = values.num_hidden_layers
    return build_stages(values, [StageSlice(0, layers, layers)])[0]


def bytes_kept(mode: Checkpointing, every: int | None = None) -> int:
    deep = {**LLAMA, "num_hidden_layers": 6}
    with after_forward(mode, deep, every) as (_, operations):
        return operations.bytes_alive()


def test_each_mode_recomputes_its_layers() -> None:
    assert layers_to_wrap(4, "none", None) == set()
    assert layers_to_wrap(4, "full", None) == layers_to_wrap(4, "selective", 2) == {0, 1, 2, 3}
    assert layers_to_wrap(9, "every_k", None) == {2, 5, 8}
    assert layers_to_wrap(4, "every_k", 4) == {3}
    assert layers_to_wrap(1, "every_k", None) == {0}


def test_each_mode_keeps_less_than_the_one_before() -> None:
    modes: tuple[Checkpointing, ...] = ("none", "elementwise", "selective", "every_k", "full")
    kept = [bytes_kept(mode) for mode in modes]
    assert sorted(set(kept), reverse=True) in (kept, [*kept[:2], kept[3], kept[2], kept[4]])
    # `full` keeps mostly the logits and the input of each layer.
    assert kept[1] < 0.75 * kept[0]
    assert kept[4] < 0.3 * kept[0]


def test_every_k_of_1_equals_full_and_a_larger_k_keeps_more() -> None:
    kept = [bytes_kept("every_k", every) for every in (1, 2, 3, 6)]
    assert kept[0] == bytes_kept("full")
    assert kept == sorted(set(kept))


@pytest.mark.parametrize(
    ("config", "repeated"), [(LLAMA, 3), ({**LLAMA, "model_type": "qwen2"}, 3), (GPT2, 2)]
)
def test_modes_repeat_the_products_that_they_do_not_store(
    config: dict[str, Any], repeated: int
) -> None:
    """`selective` repeats the key, output and up projections of each layer. Nothing repeats the
    last product, except in GPT-2, where dropout follows it: there `selective` repeats that of
    attention and the last one, and `elementwise` none. qwen2 has some biases, GPT-2 many."""
    products, attention = {}, {}
    modes: tuple[Checkpointing, ...] = ("none", "elementwise", "selective", "full")
    for mode in modes:
        with after_forward(mode, config) as (total, operations):
            total.backward()
            products[mode] = operations.num(PRODUCTS)
            attention[mode] = operations.num(STORED)
    layers = len(build(config).layers)
    assert products["elementwise"] == products["none"]
    assert products["selective"] == products["none"] + repeated * layers
    assert products["full"] > products["selective"]
    assert attention["selective"] == attention["elementwise"] == attention["none"]


LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def test_products_with_tensor_parallel_and_adapters() -> None:
    """torchtitan stores queries, values, gate and the last product; no gradient needs the last."""
    stored, repeated = (
        partial(of, linears=LINEARS, open_end=False) for of in (stored_products, repeated_products)
    )
    assert stored("selective", tp=1) == {0, 2, 4}
    assert repeated("selective", tp=1) == {1, 3, 5}
    assert stored("elementwise", tp=1) == {0, 1, 2, 3, 4, 5}
    # The scattered result of the output projection is stored, not its partial sums.
    assert stored("elementwise", tp=8) == {0, 1, 2, 4, 5}
    assert repeated("elementwise", tp=8) == {3}
    # An adapter of the last linear layer runs after it.
    assert stored("elementwise", tp=1, open_end=True) == set(range(7))


def test_the_narrow_products_of_adapters_do_not_count() -> None:
    """The same three large products of each layer are repeated as without adapters, and all of the
    four adapters."""
    counts = {}
    modes: tuple[Checkpointing, ...] = ("none", "selective")
    for mode in modes:
        with after_forward(mode, LLAMA, rank=2) as (total, operations):
            total.backward()
            counts[mode] = operations.num(PRODUCTS)
    layers, large, narrow = LLAMA["num_hidden_layers"], 3, 4 * 2
    assert counts["selective"] == counts["none"] + layers * (large + narrow)


@pytest.mark.parametrize("mode", ["elementwise", "selective", "full", "every_k"])
def test_gradients_are_the_same_to_the_last_bit(mode: Checkpointing) -> None:
    def gradients(mode: Checkpointing) -> list[torch.Tensor]:
        decoder = build(LLAMA)
        apply_activation_checkpointing(decoder, mode, None)
        allocate(decoder, torch.device("cpu"))
        first_weights([decoder], None, 0, resumed=False)
        decoder.set_positions(torch.arange(TOKENS).unsqueeze(0))
        decoder(torch.arange(TOKENS).unsqueeze(0)).square().sum().backward()
        return [p.grad for _, p in decoder.plain_parameters() if p.grad is not None]

    pairs = list(zip(gradients(mode), gradients("none"), strict=True))
    assert len(pairs) > 20
    assert all(torch.equal(a, b) for a, b in pairs)


def test_full_recomputation_stops_before_the_last_product_of_a_layer() -> None:
    """No gradient needs its result. The planner counts on it (`plan/cost/layers.py`)."""
    products = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default}

    def forward_and_backward(mode: Checkpointing) -> tuple[int, int]:
        with after_forward(mode) as (total, operations):
            forward = operations.num(products)
            total.backward()
            return forward, operations.num(products) - forward

    forward, backward = forward_and_backward("none")
    _, with_repeated = forward_and_backward("full")
    head, layers = 1, LLAMA["num_hidden_layers"]
    assert with_repeated - backward == forward - head - layers
