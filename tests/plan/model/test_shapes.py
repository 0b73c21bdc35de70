"""Parameter counts, compared with models that transformers builds on the meta device."""

from copy import deepcopy
from typing import Any

import pytest
import torch
import transformers

from orchestrator.contract.spec.model_presets import PRESETS
from orchestrator.errors import PlanError
from orchestrator.plan.model.families import DEFAULTS, TRAINABLE, shape_of
from orchestrator.plan.model.shape import ModelShape
from tests.plan.model.models import (
    LLAMA3_8B,
    MISTRAL_7B,
    MIXTRAL_8X7B,
    QWEN2_7B,
    QWEN3_30B_A3B,
    TINY,
    TINY_GPT2,
    TINY_MOE,
)
from trainer.model.families import FAMILIES


@pytest.mark.parametrize(
    "config",
    [
        *PRESETS.values(),
        {**TINY, "tie_word_embeddings": True},
        {**TINY, "attention_bias": True, "mlp_bias": True},
        {**PRESETS["qwen3-tiny"], "attention_bias": True, "tie_word_embeddings": False},
        {**TINY, "head_dim": 32},
        {**TINY, "num_key_value_heads": None},
        {"model_type": "llama", "num_hidden_layers": 2},
        {"model_type": "qwen3", "num_hidden_layers": 2},
        MISTRAL_7B,
        {**TINY, "model_type": "mistral", "head_dim": 32, "tie_word_embeddings": True},
        {"model_type": "mistral", "num_hidden_layers": 2},
        QWEN2_7B,
        {**TINY, "model_type": "qwen2", "tie_word_embeddings": True},
        {"model_type": "qwen2", "num_hidden_layers": 2, "head_dim": 64},
        {**TINY_GPT2, "n_inner": 96, "tie_word_embeddings": False},
        {"model_type": "gpt2", "hidden_size": 96, "num_hidden_layers": 2},
        {"model_type": "gpt2"},
        {"model_type": "gemma"},
        {"model_type": "gemma", "attention_bias": True, "tie_word_embeddings": False},
        {"model_type": "gemma2"},
        {"model_type": "gemma2", "attention_bias": True, "num_hidden_layers": 3},
        {"model_type": "gemma3_text"},
        {"model_type": "gemma3_text", "attention_bias": True, "num_hidden_layers": 3},
        MIXTRAL_8X7B,
        {**MIXTRAL_8X7B, "num_experts": 4, "tie_word_embeddings": True, "num_hidden_layers": 2},
        QWEN3_30B_A3B,
        TINY_MOE,
        {**TINY_MOE, "decoder_sparse_step": 2},
        {**TINY_MOE, "mlp_only_layers": [0, 5], "attention_bias": True},
        {"model_type": "qwen3_moe", "num_hidden_layers": 2},
        {"model_type": "phi3"},
        {"model_type": "granite", "num_key_value_heads": 8, "mlp_bias": True},
        {"model_type": "smollm3"},
        {"model_type": "olmo2", "num_key_value_heads": 8, "num_hidden_layers": 3},
        {"model_type": "nemotron", "num_key_value_heads": 8},
        {"model_type": "nemotron", "num_key_value_heads": 48, "mlp_bias": True, "head_dim": 64},
        {"model_type": "starcoder2"},
        {"model_type": "starcoder2", "use_bias": False, "tie_word_embeddings": False},
        {"model_type": "gpt_neox"},
        {"model_type": "gpt_neox", "attention_bias": False, "num_hidden_layers": 3},
    ],
)
def test_parameter_counts_equal_those_of_the_model(config: dict[str, Any]) -> None:
    built = transformers.AutoConfig.for_model(**deepcopy(config))
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(built)  # type: ignore[no-untyped-call]
    assert shape_of(config).parameters == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("kind", DEFAULTS)
def test_absent_keys_have_the_defaults_of_transformers(kind: str) -> None:
    built = transformers.AutoConfig.for_model(kind)
    derived = {key: value for key, value in DEFAULTS[kind].items() if value is not None}
    assert {key: getattr(built, key) for key in derived} == derived


@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        (LLAMA3_8B, 8_030_261_248),
        (PRESETS["llama3-70b"], 70_553_706_496),
        (PRESETS["llama3-405b"], 405_853_388_800),
        (PRESETS["qwen3-4b"], 4_022_468_096),
        (PRESETS["gpt2-large"], 774_030_080),
        (QWEN2_7B, 7_615_616_512),
        (MISTRAL_7B, 7_241_732_096),
        ({"model_type": "gpt2"}, 124_439_808),
        (MIXTRAL_8X7B, 46_702_792_704),
        (QWEN3_30B_A3B, 30_532_122_624),
        ({"model_type": "gpt_neox"}, 20_554_567_680),
    ],
)
def test_sizes_of_known_models_equal_the_published_ones(
    config: dict[str, Any], parameters: int
) -> None:
    """The published count is in the safetensors index on the Hugging Face hub."""
    assert shape_of(config).parameters == parameters


@pytest.mark.parametrize(
    ("kind", "fix"),
    [
        ("lama", "did you mean llama?"),
        ("Mistral", "did you mean mistral?"),
        ("llama4", "if llama4 is built like one of them, plan it as that family"),
        ("qwen2_moe", "if qwen2_moe is built like one of them"),
        ("qwen3_next", "if qwen3_next is built like one of them"),
        ("olmo3", "your own script can train any model: ndctl run -- train.py"),
    ],
)
def test_another_family_is_no_typo(kind: str, fix: str) -> None:
    with pytest.raises(PlanError) as refused:
        shape_of({"model_type": kind})
    assert fix in refused.value.fix


def test_only_the_chosen_experts_are_active() -> None:
    """Mixtral has 12.9 of 46.7 billion active (Jiang et al. 2024, "Mixtral of Experts"), Qwen3 has
    3.3 of 30.5 billion (model card)."""
    assert shape_of(MIXTRAL_8X7B).active_parameters == pytest.approx(12.9e9, rel=2e-3)
    assert shape_of(QWEN3_30B_A3B).active_parameters == pytest.approx(3.3e9, rel=2e-2)
    dense = shape_of(LLAMA3_8B)
    assert dense.active_parameters == dense.parameters


def test_flops_of_a_token_count_its_experts_and_the_router() -> None:
    shape = shape_of(TINY_MOE)
    attention = 64 * (2 * 64 + 2 * 32)
    assert shape.layer_matrices == attention + 2 * 3 * 64 * 32 + 64 * 8
    assert shape.layer_weights == attention + 8 * 3 * 64 * 32


def test_more_experts_per_token_than_exist_are_refused() -> None:
    with pytest.raises(PlanError, match="num_experts_per_tok=9 must be at most"):
        shape_of({**TINY_MOE, "num_experts_per_tok": 9})


def test_a_model_that_the_trainer_cannot_train_is_refused() -> None:
    assert set(FAMILIES) == TRAINABLE
    for kind in DEFAULTS:
        shape: ModelShape = shape_of({"model_type": kind})
        assert (shape.untrainable is None) == (kind in FAMILIES)
    told = shape_of({"model_type": "gemma2"}).untrainable
    assert told is not None
    assert "cannot train a gemma2, only gpt2, llama" in told
