"""Only the adapters are trained, saved and exported, on every mesh as on one process.

Tests import PEFT only where they need it, because its import takes seconds.
"""

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import save_file
from torch.distributed.checkpoint.filesystem import FileSystemReader
from transformers import AutoModelForCausalLM

from orchestrator.contract.files import exit_codes
from orchestrator.contract.spec.model_spec import LoraSpec, ModelSpec
from orchestrator.errors import TrainingError
from tests.trainer.launch.tiny_runs import LLAMA, MODELS, QWEN3, losses_of, tiny, work
from tests.trainer.launch.training_worker import run_alone
from tests.trainer.model.test_build import build, materialise
from tests.trainer.parallel.parity_cells import (
    GRAD_NORM,
    LOSS,
    Difference,
    deeper,
    difference,
    in_turn,
)
from trainer.model.adapters import add_adapters, base_of, draw_adapters, export_adapters
from trainer.model.decoder import Decoder, is_adapter
from trainer.parallel.buckets import trained

TARGETS = ["q_proj", "k_proj", "o_proj", "up_proj", "down_proj"]
"""Modules that tensor parallel shards by column (q, k, up) and by row (o, down)."""
SPEC = LoraSpec(rank=4, alpha=8.0, target_modules=("self_attn.q_proj", "down_proj"))


def adapted(config: dict[str, Any], seed: int = 0, spec: LoraSpec = SPEC) -> Decoder:
    decoder = build(config)
    add_adapters(decoder, spec)
    materialise(decoder, seed)
    draw_adapters(decoder, seed)
    return decoder


def adapting(out: Path, model: str, **changes: Any) -> dict[str, Any]:
    """A configuration that trains adapters, with four layers so that a pipeline can split them."""
    lora = {"rank": 4, "target_modules": TARGETS}
    config = tiny(out, micro=1, **changes)
    return {**config, "model": {"config": deeper(model), "lora": lora}}


def test_only_adapters_are_trained_and_the_model_keeps_its_names() -> None:
    decoder = adapted(LLAMA)
    named = dict(decoder.plain_parameters())
    plain = {name for name in named if not is_adapter(name)}
    assert plain == {name for name, _ in build(LLAMA).plain_parameters()}
    assert set(named) - plain == {
        f"model.layers.{layer}.{module}.lora_{matrix}.default.weight"
        for layer in range(3)
        for module in ("self_attn.q_proj", "mlp.down_proj")
        for matrix in "AB"
    }
    learning = {id(parameter) for parameter in trained(decoder)}
    assert learning == {id(p) for name, p in named.items() if is_adapter(name)}


def test_adapter_a_has_the_variance_of_peft_and_b_is_zero() -> None:
    from peft import LoraConfig, inject_adapter_in_model

    spec = replace(SPEC, rank=64)
    ours = dict(adapted(LLAMA, spec=spec).plain_parameters())
    theirs = AutoModelForCausalLM.from_config(build(LLAMA).config)
    inject_adapter_in_model(LoraConfig(r=64, target_modules=["q_proj", "down_proj"]), theirs)
    drawn = dict(theirs.named_parameters())
    for name in (name for name in ours if is_adapter(name)):
        if ".lora_B." in name:
            assert not ours[name].any()
            continue
        mine, other = ours[name], drawn[name]
        assert mine.abs().max().item() == pytest.approx(other.abs().max().item(), rel=0.02)
        assert mine.std().item() == pytest.approx(other.std().item(), rel=0.1)
    first, second = (
        ours[f"model.layers.{layer}.self_attn.q_proj.lora_A.default.weight"] for layer in (0, 1)
    )
    assert not torch.equal(first, second)


def test_an_unknown_target_is_refused_with_the_known_ones() -> None:
    with pytest.raises(TrainingError, match=r"is named proj, lm_head") as refused:
        add_adapters(build(LLAMA), replace(SPEC, target_modules=("q_proj", "proj", "lm_head")))
    assert "self_attn.q_proj" in refused.value.fix
    assert "mlp.down_proj" in refused.value.fix


def test_without_peft_the_error_names_the_extra_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(TrainingError, match="needs the package peft") as refused:
        add_adapters(build(LLAMA), SPEC)
    assert refused.value.fix == "pip install ndctl[lora]"


def test_base_weights_under_adapters_are_identified_by_content(tmp_path: Path) -> None:
    lora = LoraSpec(alpha=8.0)
    fresh = ModelSpec(config=LLAMA, lora=lora)
    assert base_of(ModelSpec(config=LLAMA)) == ""
    assert base_of(fresh) == base_of(replace(fresh, lora=replace(lora, rank=2)))
    others = [
        replace(fresh, lora=replace(lora, alpha=4.0)),
        replace(fresh, lora=replace(lora, quantize="nf4")),
        replace(fresh, config=QWEN3),
    ]
    for name, value in (("one", 1.0), ("copy of one", 1.0), ("two", 2.0)):
        (tmp_path / name).mkdir()
        save_file({"w": torch.full((4,), value)}, tmp_path / name / "model.safetensors")
    one, copy, two = (
        replace(fresh, weights=str(tmp_path / name)) for name in ("one", "copy of one", "two")
    )
    assert base_of(one) == base_of(copy)
    bases = [base_of(spec) for spec in (fresh, *others, one, two, replace(fresh, weights="a/b"))]
    assert len(set(bases)) == len(bases)


# PEFT uses a name that transformers has deprecated.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize(
    ("model", "targets"),
    [("llama", SPEC.target_modules), ("qwen3", SPEC.target_modules), ("gpt2", ("c_attn",))],
)
def test_peft_computes_the_same_logits_from_exported_adapters(
    tmp_path: Path, model: str, targets: tuple[str, ...]
) -> None:
    from peft import PeftModel

    spec = replace(SPEC, target_modules=targets)
    decoder = adapted(deeper(model), spec=spec)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in trained(decoder):
            parameter.normal_(0.0, 0.2)
    tensors = {name: parameter.detach() for name, parameter in decoder.plain_parameters()}
    export_adapters(tensors, spec, decoder.config, None, tmp_path)
    base = AutoModelForCausalLM.from_config(decoder.config)
    plain = {name: tensor for name, tensor in tensors.items() if not is_adapter(name)}
    assert not base.load_state_dict(plain, strict=False).unexpected_keys
    ids_BT = torch.randint(0, 256, (2, 16))
    decoder.set_positions(torch.arange(16).unsqueeze(0))
    with torch.no_grad():
        bare = base(ids_BT).logits
        loaded = PeftModel.from_pretrained(base, str(tmp_path)).eval()
        logits, expected = loaded(input_ids=ids_BT).logits, decoder(ids_BT)
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)
    assert (bare - expected).abs().max() > 1e-2, "the adapters do something"


TWO: dict[str, dict[str, Any]] = {
    "shard2": {"parallel": {"dp_shard": 2}},
    "tp2": {"parallel": {"tp": 2}},
    "tp2, recomputed": {"parallel": {"tp": 2}, "activation_checkpointing": "full"},
    "zero1": {"parallel": {"dp_replicate": 2, "data": "zero1"}},
    "cp2": {"parallel": {"cp": 2}},
    "pp2": {"parallel": {"pp": 2}},
    "zero bubble": {"parallel": {"pp": 2, "pipeline": {"schedule": "zbv"}}},
}
FOUR: dict[str, dict[str, Any]] = {
    "shard2 x tp2": {"parallel": {"dp_shard": 2, "tp": 2}},
    "replicate2 x shard2": {"parallel": {"dp_replicate": 2, "dp_shard": 2}},
}


def watched(configs: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"config": config, "frozen": True} for config in configs]


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Model -> run directory of its training on one process."""
    folder = tmp_path_factory.mktemp("one")
    configs = {model: adapting(folder / model, model) for model in MODELS}
    answers = run_alone(watched(configs.values()))
    assert all(answer["frozen_bytes"] for answer in answers)
    return {model: folder / model for model in MODELS}


def differences(
    folder: Path,
    num_ranks: int,
    cells: Mapping[str, dict[str, Any]],
    one: dict[str, Path],
    all_models: bool,
) -> dict[tuple[str, str], Difference]:
    """Train every cell with every model, or each cell with one model in turn. A rank fails when a
    frozen weight changes."""
    configs = {
        (model, name): adapting(folder / f"{name} {model}", model, **changes)
        for turn, (name, changes) in enumerate(cells.items())
        for model in (tuple(one) if all_models else in_turn(tuple(one), turn))
    }
    work(folder, num_ranks, watched(configs.values()))
    return {cell: difference(Path(config["out"]), one[cell[0]]) for cell, config in configs.items()}


# In every run the test below trains on two ranks, and test_parity.py on every mesh.
@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize(("num_ranks", "cells"), [(2, TWO), (4, FOUR)], ids=["2", "4"])
@pytest.mark.parametrize("all_models", [False, True], ids=["a model in turn", "all models"])
def test_adapters_train_as_on_one_process_and_the_base_model_is_unchanged(
    tmp_path: Path,
    one: dict[str, Path],
    num_ranks: int,
    cells: dict[str, dict[str, Any]],
    all_models: bool,
) -> None:
    found = differences(tmp_path, num_ranks, cells, one, all_models)
    assert all(value.within(LOSS, GRAD_NORM) for value in found.values()), found
    losses = losses_of(one["llama"])
    assert losses[5] < losses[1] - 0.01, "and they learn"


@pytest.mark.process
def test_checkpoints_hold_only_adapters_and_resume_with_the_same_model(
    tmp_path: Path, one: dict[str, Path]
) -> None:
    config = adapting(tmp_path / "moved", "llama")
    lora = {**config["model"]["lora"], "alpha": 4.0}
    other = {**config, "model": {**config["model"], "lora": lora}}
    run_alone([{"config": config, "stop_after": 3}])
    (checkpoint,) = (tmp_path / "moved" / "checkpoints").iterdir()
    saved = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    kept = {name for name in saved if name.startswith(("model.", "optimizer."))}
    assert kept
    assert all(is_adapter(name) for name in kept)
    (refused,) = run_alone([{"config": other, "refused": True}])
    assert refused["code"] == exit_codes.REFUSED
    assert "the frozen model under the adapters was " in refused["refused"]
    assert "alpha 4.0" in refused["refused"]
    work(tmp_path, 2, [{"config": {**config, "parallel": {"tp": 2}}}])
    losses, expected = losses_of(tmp_path / "moved"), losses_of(one["llama"])
    assert losses.keys() == expected.keys()
    assert all(abs(loss - expected[step]) <= LOSS for step, loss in losses.items())
