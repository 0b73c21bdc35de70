"""The model before it is trained: what is refused, and first weights that no mesh changes."""

from typing import Any

import pytest
import torch
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import SequenceParallel

from orchestrator.contract.spec import DataSpec, ModelSpec
from orchestrator.errors import TrainingError
from tests.trainer.trainer_launch import LLAMA, QWEN3
from trainer.model import build_model, layers_of, materialise
from trainer.parallel.tensor import check_divisible, layer_plan

DATA = DataSpec(files="*", sequence_length=32)
GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": 256}


def build(config: dict[str, Any]) -> Any:
    return build_model(ModelSpec(config=config), DATA)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (GPT2, "its classes are .*GPT2Block"),
        ({**LLAMA, "vocab_size": 255}, "vocab_size is 255, and bytes are 256 tokens"),
        ({**LLAMA, "max_position_embeddings": 16}, "sequence_length is 32, and the model has 16"),
        ({**LLAMA, "model_type": "lama"}, "not a model that transformers can configure"),
        ({}, "not a model that transformers can configure"),
        (
            {**QWEN3, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
            "sliding_attention",
        ),
    ],
)
def test_a_model_that_cannot_be_trained_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(TrainingError, match=message):
        build(config)


def test_a_path_that_is_not_here_is_refused() -> None:
    with pytest.raises(TrainingError, match="not a model that transformers can configure"):
        build_model(ModelSpec(path="/nowhere/at/all"), DATA)


def test_building_takes_no_memory_and_first_weights_follow_from_the_seed() -> None:
    def weights(seed: int) -> dict[str, torch.Tensor]:
        model = build(LLAMA)
        assert all(parameter.is_meta for parameter in model.parameters())
        materialise(model, seed, torch.device("cpu"))
        return dict(model.named_parameters())

    once, again, other = weights(0), weights(0), weights(1)
    assert all(torch.equal(once[name], again[name]) for name in once)
    name = "model.layers.0.self_attn.q_proj.weight"
    assert not torch.equal(once[name], other[name])
    assert once[name].std().item() == pytest.approx(0.02, rel=0.1)
    assert torch.equal(once["model.norm.weight"], torch.ones(32))


def test_rotary_frequencies_and_ties_survive_materialising() -> None:
    model = build(QWEN3)
    materialise(model, 0, torch.device("cpu"))
    rotary = model.model.rotary_emb
    expected = 1.0 / rotary.config.rope_parameters["rope_theta"] ** (torch.arange(0, 8, 2) / 8)
    torch.testing.assert_close(rotary.inv_freq, expected)
    assert torch.equal(rotary.inv_freq, rotary.original_inv_freq)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_everything_that_tp_does_not_divide_is_named() -> None:
    with pytest.raises(TrainingError, match=r"num_key_value_heads \(2\), sequence_length \(33\)"):
        check_divisible(build(LLAMA).config, 4, 33)


def test_head_norms_are_in_the_plan_of_models_that_have_them() -> None:
    assert "self_attn.q_norm" not in layer_plan(layers_of(build(LLAMA))[0])
    plan = layer_plan(layers_of(build(QWEN3))[0])
    for name in ("self_attn.q_norm", "self_attn.k_norm"):
        norm = plan[name]
        assert isinstance(norm, SequenceParallel)
        assert norm.sequence_sharding == (Shard(2),)
