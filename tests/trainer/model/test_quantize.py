"""Frozen weights in 4 bits: their size, what is refused, and training with sharded weights."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from orchestrator.contract.codec import decode
from orchestrator.contract.files.trainer_config import TrainingConfig
from orchestrator.contract.spec.model_spec import LoraSpec
from orchestrator.errors import TrainingError
from tests.trainer.launch.tiny_runs import LLAMA, tiny, work
from tests.trainer.launch.training_worker import run_alone
from tests.trainer.model.test_build import build
from tests.trainer.parallel.parity_cells import (
    GRAD_NORM,
    GRAD_NORM_BF16,
    LOSS,
    LOSS_BF16,
    difference,
)
from trainer.config import complete
from trainer.model.adapters import add_adapters, draw_adapters
from trainer.model.decoder import Decoder
from trainer.model.init_weights import allocate
from trainer.model.quantize import PARTS, fill_quantised, quantise
from trainer.model.weights import first_weights

WIDE = {**LLAMA, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
"""Its smallest weights, those of keys and values, have two blocks of 16384 elements."""
CPU = torch.device("cpu")


def quantised(seed: int = 0) -> Decoder:
    decoder = build(WIDE)
    add_adapters(decoder, LoraSpec(target_modules=("q_proj", "down_proj")))
    quantise(decoder, 1, CPU)
    allocate(decoder, CPU)
    first_weights([decoder], None, seed, resumed=False)
    draw_adapters(decoder, seed)
    fill_quantised(decoder, lambda weights: first_weights([weights], None, seed, resumed=False))
    return decoder


def qlora(out: Path, quantize: str = "nf4", **changes: Any) -> dict[str, Any]:
    config = tiny(out, **{"steps": 3, **changes})
    lora = {"rank": 4, "target_modules": ["q_proj", "down_proj"], "quantize": quantize}
    return {**config, "model": {"config": WIDE, "lora": lora}}


def test_weights_take_about_four_bits_and_stay_close_to_the_original() -> None:
    decoder, whole = quantised(), build(WIDE)
    allocate(whole, CPU)
    first_weights([whole], None, 0, resumed=False)
    expected = dict(whole.plain_parameters())
    weights = dict(decoder.quantised_parameters())
    layers = {name for name in expected if ".layers." in name and expected[name].ndim == 2}
    assert weights.keys() == layers
    stored = sum(getattr(weight, part).nbytes for weight in weights.values() for part in PARTS)
    assert 8 * stored / sum(weight.numel() for weight in weights.values()) < 4.25
    for name, weight in weights.items():
        error = weight.to(torch.float32) - expected[name]
        assert 0 < error.std() < 0.15 * expected[name].std(), name
        assert not weight.requires_grad


def test_at_most_one_layer_is_held_unquantized() -> None:
    decoder = build(WIDE)
    quantise(decoder, 1, CPU)
    allocate(decoder, CPU)
    held: list[set[str]] = []
    fill_quantised(decoder, lambda weights: held.append({n for n, _ in weights.plain_parameters()}))
    assert [{name.split(".layers.")[1].split(".")[0] for name in names} for names in held] == [
        {"0"},
        {"1"},
    ]


def test_weights_that_cannot_be_sharded_evenly_are_named() -> None:
    with pytest.raises(TrainingError, match=r"4 ranks can split evenly.*layers.0.self_attn.k_proj"):
        quantise(build(WIDE), 4, CPU)


def test_a_model_without_linear_layers_is_refused() -> None:
    config = {"model_type": "gpt2", "n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": 256}
    with pytest.raises(TrainingError, match="has no linear layer"):
        quantise(build(config), 1, CPU)


def test_without_torchao_the_error_names_the_extra_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = "torchao.quantization.quantize_.workflows.nf4.nf4_tensor"
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(TrainingError, match=r"torchao 0\.18") as refused:
        quantise(build(WIDE), 1, CPU)
    assert refused.value.fix == "pip install ndctl[quantize]"


def test_all_impossible_combinations_are_reported_at_once(tmp_path: Path) -> None:
    parallel = {"dp_shard": 2, "tp": 2, "fsdp": {"reshard_after_forward": 2}}
    values = qlora(tmp_path / "out", parallel=parallel, float8=True)
    config: TrainingConfig = decode(TrainingConfig, values)
    with pytest.raises(TrainingError) as refused:
        complete(config, 4)
    for pair in ("with train.float8", "nf4 with parallel.tp=2", "reshard_after_forward=2"):
        assert pair in refused.value.message


@pytest.mark.process
def test_shards_of_four_bit_weights_train_like_whole_weights(tmp_path: Path) -> None:
    shard2 = {"dp_shard": 2}
    one = qlora(tmp_path / "one")
    alone = {
        "full precision": qlora(tmp_path / "full precision", quantize="none"),
        "bfloat16": qlora(tmp_path / "bfloat16", dtype="bfloat16"),
    }
    cells = {
        "shard2": qlora(tmp_path / "shard2", parallel=shard2),
        "zero1": qlora(tmp_path / "zero1", parallel={"dp_replicate": 2, "data": "zero1"}),
        "pp2": qlora(tmp_path / "pp2", parallel={"pp": 2}),
    }
    watch = {"frozen": True, "unsaved": True}
    whole, full, _ = run_alone([{"config": config, **watch} for config in (one, *alone.values())])
    watched = [{"config": config, **watch} for config in cells.values()]
    sharded, *_ = work(tmp_path, 2, watched)
    found = {
        name: difference(Path(config["out"]), tmp_path / "one")
        for name, config in (cells | alone).items()
    }
    assert all(found[name].within(LOSS, GRAD_NORM) for name in cells), found
    assert found["bfloat16"].within(LOSS_BF16, GRAD_NORM_BF16), found
    assert not found["full precision"].within(LOSS, GRAD_NORM), "4 bits are fewer than 32"
    # The rest is embedding and head, which stay in full precision.
    outer = 4 * 2 * WIDE["vocab_size"] * WIDE["hidden_size"]
    assert whole["frozen_bytes"] - outer < (full["frozen_bytes"] - outer) / 7
    assert sharded["frozen_bytes"] < 0.55 * whole["frozen_bytes"]


@pytest.mark.process
@pytest.mark.slow
def test_other_shardings_of_four_bit_weights_train_like_whole_weights(tmp_path: Path) -> None:
    one, hsdp = qlora(tmp_path / "one"), {"dp_replicate": 2, "dp_shard": 2}
    shard2 = {"dp_shard": 2}
    run_alone([{"config": one}])
    cells = {
        "replicate2": qlora(tmp_path / "replicate2", parallel={"dp_replicate": 2}),
        "offload": qlora(tmp_path / "offload", parallel={**shard2, "fsdp": {"cpu_offload": True}}),
        "ac": qlora(tmp_path / "ac", parallel=shard2, activation_checkpointing="full"),
    }
    watched = [{"config": config, "frozen": True} for config in cells.values()]
    work(tmp_path, 2, watched)
    for name in cells:
        assert difference(tmp_path / name, tmp_path / "one").within(LOSS, GRAD_NORM), name
    cell = {"config": qlora(tmp_path / "hsdp", parallel=hsdp), "frozen": True}
    work(tmp_path, 4, [cell])
    found = difference(tmp_path / "hsdp", tmp_path / "one")
    assert found.within(LOSS, GRAD_NORM), found
