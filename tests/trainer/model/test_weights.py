"""Reading weights of Hugging Face folders, and the errors for weights that do not fit."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedModel

from orchestrator.contract.files.env import RankEnv
from orchestrator.contract.spec.model_spec import ModelSpec
from orchestrator.errors import TrainingError
from tests.trainer.launch.tiny_runs import LLAMA, QWEN3
from trainer.model.build import build_stages, read_model_config
from trainer.model.decoder import Decoder, StageSlice
from trainer.model.init_weights import allocate
from trainer.model.weights import INDEX, SINGLE, find_weights, first_weights
from trainer.rank.ranks import process_group

GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 256}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "llama-tied": {**LLAMA, "tie_word_embeddings": True},
    "mistral": {**LLAMA, "model_type": "mistral", "sliding_window": None},
    "qwen2": {**LLAMA, "model_type": "qwen2"},
    "qwen3": QWEN3,
    "gpt2": GPT2,
}
Q = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    with process_group(RankEnv()):
        yield


def model_of(values: dict[str, Any]) -> PreTrainedModel:
    torch.manual_seed(3)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(AutoConfig.for_model(**values))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)  # norms and biases too
    return model


def spec_of(folder: Path) -> ModelSpec:
    return ModelSpec(path=str(folder), weights=str(folder))


def decoder_of(folder: Path) -> Decoder:
    config = read_model_config(spec_of(folder))
    layers = config.num_hidden_layers
    (decoder,) = build_stages(config, [StageSlice(0, layers, layers)])
    allocate(decoder, torch.device("cpu"))
    return decoder


def read(folder: Path) -> Decoder:
    decoder = decoder_of(folder)
    first_weights([decoder], find_weights(spec_of(folder)), seed=0, resumed=False)
    return decoder


def assert_same(decoder: Decoder, model: PreTrainedModel) -> None:
    expected = dict(model.named_parameters())
    read = dict(decoder.plain_parameters())
    assert read.keys() == expected.keys()
    assert all(torch.equal(read[name], expected[name].float()) for name in read)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    model_of(LLAMA).save_pretrained(tmp_path)
    return tmp_path


def rewrite(folder: Path, **changes: torch.Tensor | None) -> None:
    """Change tensors of the only file. None removes a tensor."""
    tensors = load_file(folder / SINGLE) | {k.replace("__", "."): v for k, v in changes.items()}
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, folder / SINGLE, metadata={"format": "pt"})


def refusal(folder: Path) -> str:
    with pytest.raises(TrainingError) as caught:
        find_weights(spec_of(folder))
    return caught.value.message


@pytest.mark.parametrize("family", list(FAMILIES))
def test_every_family_is_read_as_it_was_saved(tmp_path: Path, family: str) -> None:
    model = model_of(FAMILIES[family])
    model.save_pretrained(tmp_path)
    assert_same(read(tmp_path), model)


@pytest.mark.parametrize("family", list(FAMILIES))
def test_rows_of_a_padded_vocabulary_start_at_zero(tmp_path: Path, family: str) -> None:
    model = model_of(FAMILIES[family] | {"vocab_size": 257})
    model.save_pretrained(tmp_path)
    spec = ModelSpec(path=str(tmp_path), weights=str(tmp_path), pad_vocab_to_multiple_of=64)
    config = read_model_config(spec)
    (decoder,) = build_stages(config, [StageSlice(0, 2, 2)])
    allocate(decoder, torch.device("cpu"))
    with torch.no_grad():
        for _, parameter in decoder.plain_parameters():
            parameter.fill_(7.0)
    first_weights([decoder], find_weights(spec), seed=0, resumed=False)
    expected = dict(model.named_parameters())
    for name, parameter in decoder.plain_parameters():
        rows = len(expected[name])
        assert torch.equal(parameter[:rows], expected[name].float())
        assert torch.equal(parameter[rows:], torch.zeros_like(parameter[rows:]))
    assert config.vocab_size == 320


def test_weights_of_another_vocabulary_are_refused_although_it_is_padded(llama: Path) -> None:
    """Files of 256 tokens fit a vocabulary padded from 256, not the 320 of another model."""
    config = LLAMA | {"vocab_size": 300}
    spec = ModelSpec(config=config, weights=str(llama), pad_vocab_to_multiple_of=64)
    with pytest.raises(TrainingError, match=r"has shape \(256, \d+\) in the files"):
        find_weights(spec)


def test_parts_of_a_sharded_index_are_found(tmp_path: Path) -> None:
    model = model_of(LLAMA)
    model.save_pretrained(tmp_path, max_shard_size="30KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    assert_same(read(tmp_path), model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_types_become_float32(tmp_path: Path, dtype: torch.dtype) -> None:
    model = model_of(LLAMA)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    model.save_pretrained(tmp_path)
    assert_same(read(tmp_path), model)


@pytest.mark.parametrize("family", ["gpt2", "llama-tied"])
def test_a_file_without_the_head_lacks_the_prefix(tmp_path: Path, family: str) -> None:
    """The GPT-2 on the hub is like this. It also contains attention masks."""
    model = model_of(FAMILIES[family])
    base: Any = AutoModel.from_config(model.config)
    base.load_state_dict(model.base_model.state_dict())
    base.save_pretrained(tmp_path)
    if family == "gpt2":
        rewrite(tmp_path, h__0__attn__bias=torch.ones(1, 1, 4, 4))
    assert_same(read(tmp_path), model)


def test_a_tied_model_may_be_saved_with_the_head_alone_or_with_both(tmp_path: Path) -> None:
    model = model_of(QWEN3)
    model.save_pretrained(tmp_path)
    embedding = load_file(tmp_path / SINGLE)["model.embed_tokens.weight"]
    rewrite(tmp_path, lm_head__weight=embedding.clone())
    assert_same(read(tmp_path), model)
    rewrite(tmp_path, model__embed_tokens__weight=None)
    assert_same(read(tmp_path), model)


def test_a_head_that_differs_is_not_tied_silently(tmp_path: Path) -> None:
    model_of(QWEN3).save_pretrained(tmp_path)
    rewrite(tmp_path, lm_head__weight=torch.zeros(256, 32))
    assert "lm_head.weight differs from model.embed_tokens.weight" in refusal(tmp_path)


def test_all_mismatches_are_reported_at_once(llama: Path) -> None:
    rewrite(
        llama,
        model__norm__weight=None,
        lm_head__weight=torch.zeros(256, 31),
        model__embed_tokens__weight=torch.zeros(256, 32, dtype=torch.int8),
        vision__weight=torch.zeros(1),
    )
    message = refusal(llama)
    for words in (
        "model.norm.weight is missing",
        "lm_head.weight has shape (256, 31) in the files and (256, 32) in the model",
        "model.embed_tokens.weight has type I8, not one of F64, F32, F16, BF16",
        "vision.weight is not in the model",
    ):
        assert words in message
    assert str(llama) in message


def test_a_long_list_is_shortened(llama: Path) -> None:
    names = [name for name in load_file(llama / SINGLE) if "layers.1" in name]
    rewrite(llama, **dict.fromkeys(name.replace(".", "__") for name in names))
    assert "; and 3 more" in refusal(llama)


def test_the_weights_of_another_configuration_are_refused(llama: Path) -> None:
    config = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 4}))
    assert "model.layers.3.self_attn.q_proj.weight is missing" in refusal(llama)
    (llama / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 2}))
    assert "model.layers.2.input_layernorm.weight is not in the model" in refusal(llama)


def test_a_truncated_file_is_named(llama: Path) -> None:
    content = (llama / SINGLE).read_bytes()
    for torn in (content[:-100], content[:50], b"version https://git-lfs"):
        (llama / SINGLE).write_bytes(torn)
        assert f"failed to read {llama / SINGLE}" in refusal(llama)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    model_of(LLAMA).save_pretrained(tmp_path, max_shard_size="30KB")
    gone = sorted(tmp_path.glob("*.safetensors"))[1]
    gone.unlink()
    assert f"lacks files that its index names: {gone.name}" in refusal(tmp_path)
    (tmp_path / INDEX).write_text("{")
    assert f"failed to read {tmp_path / INDEX}" in refusal(tmp_path)
    (tmp_path / INDEX).unlink()
    assert f"has neither {SINGLE} nor {INDEX}" in refusal(tmp_path)


@pytest.mark.parametrize("source", ["/nowhere/at/all", "ignore_progress/no-such-model"])
def test_a_model_that_is_no_folder_and_not_in_the_cache_is_refused(
    llama: Path, source: str
) -> None:
    with pytest.raises(TrainingError, match="neither a folder nor a model in the local hub cache"):
        find_weights(ModelSpec(path=str(llama), weights=source))


def test_a_file_that_is_damaged_after_its_check_is_named(llama: Path) -> None:
    """For example, another host has a different copy of the file."""
    weights = find_weights(spec_of(llama))
    decoder = decoder_of(llama)
    (llama / SINGLE).unlink()
    with pytest.raises(TrainingError, match=f"failed to read .*{SINGLE}"):
        first_weights([decoder], weights, seed=0, resumed=False)


def test_a_resumed_job_reads_only_weights_that_its_checkpoint_lacks(llama: Path) -> None:
    """If only adapters are trained, a checkpoint lacks the frozen weights."""
    decoder = decoder_of(llama)
    frozen = decoder.get_parameter(Q)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.fill_(7.0)
    frozen.requires_grad_(False)
    first_weights([decoder], find_weights(spec_of(llama)), seed=0, resumed=True)
    assert torch.equal(frozen, load_file(llama / SINGLE)[Q])
    others = [p for p in decoder.parameters() if p is not frozen]
    assert all(torch.equal(p, torch.full_like(p, 7.0)) for p in others)


def test_no_file_is_searched_if_no_weights_are_named(llama: Path) -> None:
    assert find_weights(ModelSpec(path=str(llama))) is None
