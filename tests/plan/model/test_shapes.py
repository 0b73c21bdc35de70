"""Parameter counts, compared with models that transformers builds on the meta device."""

from operator import attrgetter
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.contract.spec.model_presets import PRESETS
from orchestrator.errors import PlanError
from orchestrator.plan.model.families import TRAINABLE, shape_of
from orchestrator.plan.model.family_table import FAMILIES
from orchestrator.plan.model.shape import ModelShape, layer_sizes
from tests.plan.model import models
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
from tests.plan.model.variants import built, default, variants
from trainer.model.families import FAMILIES as OF_TRAINER


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
        *(
            {**one, "num_hidden_layers": 2}
            for one in (models.FALCON_40B, models.FALCON_11B, models.FALCON_RW_1B)
        ),
        {**models.STARCODER, "n_layer": 2},
        {**models.HUNYUAN_A13B, "num_hidden_layers": 2},
        {**models.MPT_7B, "n_layers": 2},
        {"model_type": "opt", "num_hidden_layers": 2, "enable_bias": False},
        {
            "model_type": "exaone_moe",
            "mlp_layer_types": ["sparse", "dense"],
            "num_hidden_layers": 2,
        },
        {"model_type": "nemotron", "num_key_value_heads": 8, "hidden_act": "xielu"},
    ],
)
def test_parameter_counts_equal_those_of_the_model(config: dict[str, Any]) -> None:
    assert shape_of(config).parameters == parameters(config)


def parameters(config: dict[str, Any]) -> int:
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(built(config))  # type: ignore[no-untyped-call]
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_family_without_keys_is_the_model_that_transformers_builds(kind: str) -> None:
    config = default(kind)
    assert shape_of(config).parameters == parameters(config)


@pytest.mark.parametrize("kind", FAMILIES)
@settings(max_examples=3, deadline=None)
@given(data=st.data())
def test_any_values_of_the_keys_give_the_parameters_of_the_model(
    kind: str, data: st.DataObject
) -> None:
    config = data.draw(variants(kind))
    assert shape_of(config).parameters == parameters(config)


@pytest.mark.parametrize("kind", FAMILIES)
def test_absent_keys_have_the_defaults_of_transformers(kind: str) -> None:
    of_class = built(default(kind))
    keys = {key: value for key, value in FAMILIES[kind].keys.items() if value is not None}
    # Their constructors replace these by what they stand for.
    for key, value in (("mlp_only_layers", []), ("moe_layer_end_index", 27)):
        keys |= {key: value} if key in keys else {}
    assert {key: attrgetter(key)(of_class) for key in keys} == keys


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
        (models.DEEPSEEK_V2, 235_741_434_880),
        (models.DEEPSEEK_V2_LITE, 15_706_484_224),
        # Without the values that balance experts, 256 for each of 58 layers and 384 for each of 60:
        # the published files have them as weights, transformers as buffers.
        (models.DEEPSEEK_V3, 671_026_419_200 - 58 * 256),
        (models.KIMI_K2, 1_026_408_232_448 - 60 * 384),
        (models.QWEN15_MOE_A27B, 14_315_784_192),
        (models.OLMOE_1B_7B, 6_919_161_856),
        (models.GPT_OSS_20B, 20_914_757_184),
        (models.GPT_OSS_120B, 116_829_156_672),
        (models.MIXTRAL_8X22B, 140_620_634_112),
        (models.QWEN3_235B_A22B, 235_093_634_560),
        (models.OPT_1_3B, 1_315_758_080),
        (models.BLOOM, 176_247_271_424),
        (models.FALCON_7B, 6_921_720_704),
        (models.FALCON_40B, 41_303_293_952),
        (models.MPT_7B, 6_649_286_656),
        (models.STARCODER, 15_517_456_384),
        (models.GPT_NEO_2_7B, 2_651_307_520),
        (models.PYTHIA_12B, 11_846_072_320),
        ({"model_type": "gptj"}, 6_050_882_784),
        (models.APERTUS_8B, 8_053_338_176),
        (models.BITNET_2B, 2_412_820_480),
        (models.HUNYUAN_A13B, 80_393_183_232),
    ],
)
def test_sizes_of_known_models_equal_the_published_ones(
    config: dict[str, Any], parameters: int
) -> None:
    """The published count is in the safetensors index on the Hugging Face hub."""
    assert shape_of(config).parameters == parameters


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("lama", "did you mean llama?"),
        ("Mistral", "did you mean mistral?"),
        ("deepseek_v4", "if it is built like one of llama, mistral, "),
        ("llama4", "if it is built like one of "),
        ("qwen3_next", "'qwen3_next' cannot be planned: it has layers with linear attention"),
        ("deepseek_v32", "besides the layers of deepseek_v3"),
        ("falcon_h1", "it has layers without attention"),
        ("gemma4_text", "it has layers of several sizes"),
        ("gpt_neox_japanese", "your own script can train any model: ndctl run -- train.py"),
    ],
)
def test_another_family_is_no_typo(kind: str, words: str) -> None:
    with pytest.raises(PlanError) as refused:
        shape_of({"model_type": kind})
    assert words in f"{refused.value.message} {refused.value.fix}"


@pytest.mark.parametrize(
    ("config", "active", "embedding"),
    [
        # Jiang et al. 2024, "Mixtral of Experts", and the model cards.
        (MIXTRAL_8X7B, 12.9, True),
        (models.MIXTRAL_8X22B, 39, True),
        (QWEN3_30B_A3B, 3.3, True),
        (models.QWEN3_235B_A22B, 22, True),
        (models.QWEN15_MOE_A27B, 2.7, True),
        (models.OLMOE_1B_7B, 1.3, True),
        (models.DEEPSEEK_V2, 21, True),
        (models.DEEPSEEK_V3, 37, True),
        (models.DEEPSEEK_V2_LITE, 2.4, False),
        (models.GPT_OSS_20B, 3.6, False),
        (models.GPT_OSS_120B, 5.1, False),
        (models.KIMI_K2, 32, False),
        (models.GLM_4_5, 32, False),
        (models.LLAMA4_SCOUT, 17, True),
        (models.LLAMA4_MAVERICK, 17, True),
        (models.ERNIE_21B_A3B, 3, False),
        (models.PHI_3_5_MOE, 6.6, True),
        (models.HUNYUAN_A13B, 12.7, True),
        (models.MINIMAX_M2, 10, False),
    ],
)
def test_only_the_chosen_experts_are_active(
    config: dict[str, Any], active: float, embedding: bool
) -> None:
    """Billions of parameters of a token; some sources leave out the embedding."""
    shape = shape_of(config)
    lookup = 0 if embedding else shape.vocabulary_parameters
    assert shape.active_parameters - lookup == pytest.approx(active * 1e9, rel=0.05)


def test_a_dense_model_is_active_as_a_whole() -> None:
    dense = shape_of(LLAMA3_8B)
    assert dense.active_parameters == dense.parameters


@pytest.mark.parametrize(
    ("config", "billions"),
    [
        (models.GLM_4_5, 353),
        (models.LLAMA4_SCOUT, 107.8),
        (models.LLAMA4_MAVERICK, 401),
        (models.PHI_3_5_MOE, 41.9),
        (models.ERNIE_21B_A3B, 21.8),
        (models.MINIMAX_M2, 229),
    ],
)
def test_rounded_sizes_of_known_models(config: dict[str, Any], billions: float) -> None:
    """Model cards. GLM-4.5 has 355 with its layer for the token after the next."""
    assert shape_of(config).parameters == pytest.approx(billions * 1e9, rel=2e-3)


def test_flops_of_a_token_count_its_experts_and_the_router() -> None:
    shape = shape_of(TINY_MOE)
    attention = 64 * (2 * 64 + 2 * 32)
    assert shape.layer_matrices == attention + 2 * 3 * 64 * 32 + 64 * 8
    assert layer_sizes(shape).split == attention + 8 * 3 * 64 * 32


def test_latent_attention_has_heads_of_two_sizes() -> None:
    """DeepSeek-V3 (DeepSeek-AI 2024, section 4.2): 128 heads of 128 + 64 and of 128 features."""
    shape = shape_of(models.DEEPSEEK_V3)
    assert (shape.query_size, shape.key_size) == (128 * 192, 128 * 192)
    assert (shape.value_size, shape.result_size) == (128 * 128, 128 * 128)
    assert [name for name, *_ in shape.linear][:5] == [
        "q_a_proj",
        "q_b_proj",
        "kv_a_proj_with_mqa",
        "kv_b_proj",
        "o_proj",
    ]
    assert shape.dense_layers == (0, 1, 2)


def test_without_query_rank_queries_are_computed_at_once() -> None:
    shape = shape_of(models.DEEPSEEK_V2_LITE)
    assert shape.linear[0] == ("q_proj", 2048, 16 * 192)


def test_a_model_whose_layers_are_all_dense_has_no_experts() -> None:
    shape = shape_of({**models.DEEPSEEK_V3, "num_hidden_layers": 3})
    assert (shape.num_experts, shape.intermediate_size) == (0, 18432)


@pytest.mark.parametrize("outer", ["mistral3", "llava", "some_new_model"])
def test_the_text_model_inside_of_another_one_is_planned(outer: str) -> None:
    shape = shape_of({"model_type": outer, "text_config": {**TINY}, "vision_config": {}})
    assert shape.parameters == shape_of(TINY).parameters
    assert shape.untrainable is not None
    assert f"cannot train a {outer}" in shape.untrainable
    assert "planned is its text model alone, a llama" in shape.untrainable


def test_keys_of_a_text_model_are_named_with_their_place() -> None:
    with pytest.raises(PlanError, match=r"text_config\.hidden_size must be a whole number"):
        shape_of({"model_type": "mistral3", "text_config": {**TINY, "hidden_size": "4k"}})
    with pytest.raises(PlanError, match=r"text_config\.model_type 'qwen3_omni_text' is not one of"):
        shape_of({"model_type": "qwen3_omni", "text_config": {"model_type": "qwen3_omni_text"}})


def test_all_mistakes_are_told_at_once() -> None:
    wrong = {
        **TINY_MOE,
        "num_experts": 0,
        "num_experts_per_tok": True,
        "hidden_size": None,
        "num_key_value_heads": 3,
        "mlp_only_layers": ["first"],
        "attention_bias": "yes",
    }
    with pytest.raises(PlanError) as refused:
        shape_of(wrong)
    assert refused.value.message.splitlines() == [
        "the model's config is invalid:",
        "  hidden_size must be a whole number, at least 1, got None",
        "  attention_bias must be true or false, got 'yes'",
        "  num_experts must be a whole number, at least 1, got 0",
        "  num_experts_per_tok must be a whole number, at least 1, got True",
        "  mlp_only_layers must be a list of layers, got ['first']",
        "  num_key_value_heads=3 must divide num_attention_heads=4",
    ]


def test_wrong_values_about_windows_are_told_in_any_family() -> None:
    with pytest.raises(PlanError) as refused:
        shape_of({**TINY, "sliding_window": "4k", "layer_types": 3})
    assert refused.value.message.splitlines()[1:] == [
        "  sliding_window must be a whole number, at least 0, or null, got '4k'",
        "  layer_types must be a list with the kind of each layer, got 3",
    ]
    assert shape_of({**TINY_MOE, "sliding_window": 0, "layer_types": None}).window is None


def test_more_experts_per_token_than_exist_are_refused() -> None:
    with pytest.raises(PlanError, match="num_experts_per_tok=9 must be at most"):
        shape_of({**TINY_MOE, "num_experts_per_tok": 9})


def test_a_model_that_the_trainer_cannot_train_is_refused() -> None:
    assert set(OF_TRAINER) == TRAINABLE
    for kind in FAMILIES:
        shape: ModelShape = shape_of(default(kind))
        assert (shape.untrainable is None) == (kind in OF_TRAINER)
    told = shape_of({"model_type": "gemma2"}).untrainable
    assert told is not None
    assert "cannot train a gemma2, only gpt2, llama" in told
    experts = shape_of(TINY_MOE).untrainable
    assert experts is not None
    assert "no expert parallelism: fsdp and tp split the experts" in experts


def test_more_heads_than_features_are_refused() -> None:
    with pytest.raises(PlanError, match="num_attention_heads=8192 must be at most hidden_size=64"):
        shape_of({**TINY_MOE, "num_attention_heads": 8192, "hidden_size": 64, "head_dim": None})


FALCON_NEW = {**models.FALCON_40B, "parallel_attn": True}


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (
            models.OPT_350M,
            [
                "word_embed_proj_dim must be 1024, like hidden_size, got 512: no other opt can be",
                "do_layer_norm_before must be true, got False: no other opt can be planned",
            ],
        ),
        (
            {**models.MPT_7B, "expansion_ratio": 2, "attn_config": {"alibi": False}},
            [
                "expansion_ratio must be 4, got 2: no other mpt can be planned",
                "attn_config.alibi must be true, got False",
            ],
        ),
        ({**FALCON_NEW, "parallel_attn": False}, ["parallel_attn must be true with new_decoder"]),
        ({**FALCON_NEW, "num_kv_heads": 24}, ["num_kv_heads=24 must divide num_attention_heads="]),
        ({**FALCON_NEW, "num_ln_in_parallel_attn": 3}, ["num_ln_in_parallel_attn must be 1 or 2"]),
        (
            {**models.FALCON_7B, "num_ln_in_parallel_attn": 2},
            ["num_ln_in_parallel_attn must be 1 or null with new_decoder_architecture=false"],
        ),
        (
            {**models.FALCON_RW_1B, "num_kv_heads": 8},
            ["num_kv_heads must be 32, like num_attention_heads, with multi_query=false"],
        ),
        (
            {"model_type": "opt", "activation_function": ["relu"], "hidden_size": 0},
            ["hidden_size must be a whole number", "activation_function must be one of relu, "],
        ),
        ({**TINY_GPT2, "add_cross_attention": True}, ["add_cross_attention must be false"]),
        ({"model_type": "gptj", "n_head": 5}, ["n_head=5 must divide n_embd=4096"]),
        ({**TINY, "hidden_act": "xielu"}, ["hidden_act must have no weights of its own"]),
        ({**models.HUNYUAN_A13B, "moe_topk": [8, 4]}, ["moe_topk must be a whole number"]),
        (
            {**models.HUNYUAN_A13B, "moe_intermediate_size": 1024},
            ["moe_intermediate_size must be 3072, like intermediate_size, got 1024"],
        ),
        ({"model_type": "mellum", "mlp_layer_types": ["sparse"]}, ["for each of 28 layers, got 1"]),
        ({"model_type": "mellum", "mlp_layer_types": ["moe"]}, ["a list with dense or sparse"]),
        ({"model_type": "glm4_moe_lite", "first_k_dense_replace": 3}, ["must be 1, got 3"]),
        ({"model_type": "iquestcoder", "clip_qkv": 8.0}, ["clip_qkv must be absent, got 8.0"]),
        ({"model_type": "internlm3", "qkv_bias": True}, ["mlp_bias must be true, like attention_"]),
        (
            {"model_type": "bloom", "n_embed": 64, "hidden_size": 128},
            ["hidden_size has two values, as n_embed and hidden_size are names of one key"],
        ),
    ],
)
def test_models_with_other_parts_are_refused(config: dict[str, Any], told: list[str]) -> None:
    """They would be planned wrongly, since transformers builds other layers, or ignores a key."""
    with pytest.raises(PlanError) as refused:
        shape_of(config)
    lines = refused.value.message.splitlines()[1:]
    assert len(lines) == len(told)
    assert all(one in line for one, line in zip(told, lines, strict=True))


def test_positions_of_alibi_have_no_end_and_no_weights() -> None:
    shape = shape_of(models.BLOOM)
    assert (shape.rotary_size, shape.positions) == (0, 0)
    assert shape.max_positions > 10**9


def test_a_model_whose_attention_stores_scores_is_planned_with_a_warning() -> None:
    told = shape_of(models.BLOOM).untrainable
    assert told is not None
    assert "attention is planned without a score matrix, but the one of transformers" in told
