"""Building a model: what is refused, and initial weights that depend only on the seed."""

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from orchestrator.contract.spec.model_spec import ModelSpec
from orchestrator.errors import TrainingError
from tests.trainer.launch.tiny_runs import LLAMA, QWEN3
from trainer.model.build import build_stages, check_model, read_model_config
from trainer.model.decoder import Decoder, StageSlice
from trainer.model.init_weights import allocate
from trainer.model.weights import first_weights
from trainer.parallel.tensor import WHOLE, check_tensor_parallel, layer_plan

GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": 256}


def build(config: dict[str, Any]) -> Decoder:
    values = read_model_config(ModelSpec(config=config))
    check_model(values, 256, 32)
    layers = values.num_hidden_layers
    return build_stages(values, [StageSlice(0, layers, layers)])[0]


def materialise(decoder: Decoder, seed: int) -> None:
    allocate(decoder, torch.device("cpu"))
    first_weights([decoder], None, seed, resumed=False)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**GPT2, "model_type": "opt"}, "does not support model_type opt"),
        ({**LLAMA, "vocab_size": 255}, "vocab_size is 255, but the tokenizer has 256 tokens"),
        ({**LLAMA, "max_position_embeddings": 16}, "sequence_length is 32, but the model has 16"),
        ({**LLAMA, "model_type": "lama"}, "not a model that transformers can configure"),
        ({}, "not a model that transformers can configure"),
        (
            {**QWEN3, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
            "attends to a window of 8 tokens",
        ),
    ],
)
def test_a_model_that_cannot_be_trained_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(TrainingError, match=message):
        build(config)


def test_a_missing_path_is_refused() -> None:
    with pytest.raises(TrainingError, match="not a model that transformers can configure"):
        read_model_config(ModelSpec(path="/nowhere/at/all"))


def test_building_takes_no_memory_and_initial_weights_follow_from_the_seed() -> None:
    def weights(seed: int) -> dict[str, torch.Tensor]:
        model = build(LLAMA)
        assert all(parameter.is_meta for parameter in model.parameters())
        materialise(model, seed)
        return dict(model.named_parameters())

    once, again, other = weights(0), weights(0), weights(1)
    assert all(torch.equal(once[name], again[name]) for name in once)
    name = "model.layers.0.self_attn.q_proj.weight"
    assert not torch.equal(once[name], other[name])
    assert once[name].std().item() == pytest.approx(0.02, rel=0.1)
    assert torch.equal(once["model.norm.weight"], torch.ones(32))


def test_rotary_frequencies_and_ties_survive_materialising() -> None:
    model = build(QWEN3)
    materialise(model, 0)
    rotary: Any = model.get_submodule("model.rotary_emb")
    expected = 1.0 / rotary.config.rope_parameters["rope_theta"] ** (torch.arange(0, 8, 2) / 8)
    torch.testing.assert_close(rotary.inv_freq, expected)
    assert torch.equal(rotary.inv_freq, rotary.original_inv_freq)
    assert model.get_parameter("lm_head.weight") is model.get_parameter("model.embed_tokens.weight")


@pytest.mark.parametrize(
    ("wrong", "named"),
    [({"hidden_act": "nope"}, "KeyError: 'nope'"), ({"head_dim": "a"}, "'head_dim'")],
)
def test_a_value_of_which_no_model_can_be_built_is_refused(
    wrong: dict[str, Any], named: str
) -> None:
    """Not an exception of a rank, which would be restarted and blamed."""
    with pytest.raises(TrainingError) as caught:
        build(LLAMA | wrong)
    assert named in caught.value.message
    assert caught.value.fix


def test_all_sizes_that_tp_does_not_divide_are_named() -> None:
    with pytest.raises(
        TrainingError, match=r"num_key_value_heads \(2\), tokens of a sequence \(33\)"
    ):
        check_tensor_parallel(build(LLAMA).config, 4, 33)


def test_head_norms_are_in_the_plan_of_models_that_have_them() -> None:
    assert "self_attn.q_norm" not in layer_plan(build(LLAMA).layers["0"])
    plan = layer_plan(build(QWEN3).layers["0"])
    assert plan["self_attn.q_norm"] == plan["self_attn.k_norm"] == WHOLE


def test_dropout_is_placed_as_in_transformers() -> None:
    values = read_model_config(
        ModelSpec(config={**GPT2, "embd_pdrop": 0.5, "resid_pdrop": 0.5, "attn_pdrop": 0.0})
    )
    model = build(values.to_dict())
    materialise(model, 0)
    theirs = AutoModelForCausalLM.from_config(values)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            parameter.copy_(dict(model.plain_parameters())[name])
    ids = torch.arange(32).unsqueeze(0)
    model.set_positions(torch.arange(32).unsqueeze(0))
    torch.manual_seed(1)
    expected = theirs.train()(ids).logits
    torch.manual_seed(1)
    torch.testing.assert_close(model.train()(ids), expected)
