"""Model FLOPs, compared with figures computed by hand."""

import math
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from tests.trainer.launch.tiny_runs import LLAMA, QWEN3
from trainer.measure.flops import device_peak, flops_per_token
from trainer.model.build import build_stages
from trainer.model.decoder import Decoder, StageSlice
from trainer.rank.ranks import Ranks

LLAMA_8B: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}


def alone() -> Ranks:
    mesh: Any = type("Mesh", (), {"__getitem__": lambda self, axis: self, "size": lambda self: 1})()
    return Ranks(env=None, device=torch.device("cpu"), mesh=mesh, data_rank=0)  # type: ignore[arg-type]


def model(values: dict[str, Any]) -> Decoder:
    values = {**values}
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    layers = config.num_hidden_layers
    return build_stages(config, [StageSlice(0, layers, layers)])[0]


def by_hand(values: dict[str, Any], norms: int, sequence: int) -> float:
    hidden, layers, heads = (
        values[key] for key in ("hidden_size", "num_hidden_layers", "num_attention_heads")
    )
    head_dim = values.get("head_dim", hidden // heads)
    attention = 2 * hidden * head_dim * (heads + values["num_key_value_heads"])
    layer = attention + 3 * hidden * values["intermediate_size"] + norms
    weights = layers * layer + hidden + values["vocab_size"] * hidden
    return 6 * weights + 12 * layers * heads * head_dim * sequence


def test_flops_of_a_llama_equal_the_formula_of_palm() -> None:
    assert flops_per_token([model(LLAMA)], alone(), 32) == by_hand(LLAMA, 2 * 32, 32)
    # 8.03e9 parameters less 0.53e9 of the embedding.
    assert flops_per_token([model(LLAMA_8B)], alone(), 0) / 6 == pytest.approx(7.505e9, rel=1e-3)


def test_a_tied_head_counts_as_a_matrix_multiplication() -> None:
    assert flops_per_token([model(QWEN3)], alone(), 32) == by_hand(QWEN3, 2 * 32 + 2 * 8, 32)


def test_stages_add_up_to_the_model() -> None:
    values = {**LLAMA}
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    stages = build_stages(config, [StageSlice(0, 1, 3), StageSlice(1, 3, 3)])
    assert flops_per_token(stages, alone(), 32) == flops_per_token([model(LLAMA)], alone(), 32)


def test_frozen_weights_need_no_flops_for_their_gradient() -> None:
    frozen = model(LLAMA).requires_grad_(False)
    attention = 12 * 3 * 32 * 32
    trained = flops_per_token([model(LLAMA)], alone(), 32) - attention
    found = flops_per_token([frozen], alone(), 32) - attention
    assert math.isclose(found, trained * 4 / 6)


def test_devices_are_recognised_by_their_names() -> None:
    names = {
        "NVIDIA H100 80GB HBM3": 989.5e12,
        "NVIDIA H100 PCIe": 756.5e12,
        "NVIDIA H200": 989.5e12,
        "NVIDIA A100-SXM4-80GB": 312e12,
        "NVIDIA B200": 2250e12,
        "NVIDIA GeForce RTX 4090": 165.2e12,
    }
    assert {name: device_peak(name, "bfloat16") for name in names} == names
    assert device_peak("NVIDIA H100 80GB HBM3", "float32") == 67e12
    assert device_peak("Some other device", "bfloat16") is None
