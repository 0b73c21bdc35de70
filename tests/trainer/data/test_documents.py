"""A packed batch with document masks trains as if each document went through the model alone."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM

from orchestrator.contract.spec.model_spec import ModelSpec
from orchestrator.contract.spec.train_spec import TrainSpec
from tests.trainer.data.data_files import packed, sequences, write_rows
from tests.trainer.launch.tiny_runs import LLAMA, QWEN3
from trainer.data.documents import documents_at
from trainer.data.packing.documents import Columns
from trainer.loss import TokenLoss
from trainer.model.build import build_stages, read_model_config
from trainer.model.decoder import Decoder, StageSlice
from trainer.model.init_weights import allocate
from trainer.model.weights import first_weights
from trainer.parallel.context.in_documents import apply_document_masks

GPT2 = {
    "model_type": "gpt2",
    "vocab_size": 256,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "attn_pdrop": 0.0,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
}
TOKENS = 64
ROWS = [{"q": f"what is {n}?", "a": "word " * (n % 5 + 1)} for n in range(40)]


@pytest.mark.parametrize("config", [LLAMA, QWEN3, GPT2], ids=["llama", "qwen3", "gpt2"])
def test_masked_documents_train_like_documents_alone(tmp_path: Path, config: Any) -> None:
    files = write_rows(tmp_path / "rows.jsonl", ROWS)
    cut = sequences([packed(files, tmp_path / "x.tokens", Columns("a", "q"))], TOKENS)
    rows = [cut.read(n) for n in (0, 3)]
    inputs_BT, labels_BT = (torch.stack([torch.from_numpy(row[i]) for row in rows]) for i in (0, 1))
    starts_BS = torch.stack([torch.from_numpy(cut.document_starts(n)) for n in (0, 3)])
    decoder = _decoder(config)
    loss = decoder(inputs_BT, labels_BT, documents_at(starts_BS, torch.arange(TOKENS)))
    loss.backward()

    alone = _transformers_model(config, decoder)
    expected = torch.zeros(())
    for tokens_T, labels_T in zip(inputs_BT, labels_BT, strict=True):
        for document in _documents(tokens_T):
            logits = alone(tokens_T[document].unsqueeze(0)).logits[0]
            expected = expected + cross_entropy(logits, labels_T[document], reduction="sum")
    expected = expected / labels_BT.numel()
    expected.backward()
    torch.testing.assert_close(loss, expected)
    gradients = {name: p.grad for name, p in alone.named_parameters()}
    for name, parameter in decoder.plain_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-4, atol=1e-6)


def _documents(tokens_T: torch.Tensor) -> list[slice]:
    """By the end tokens, which the byte tokenizer writes as 0."""
    ends = [at + 1 for at, token in enumerate(tokens_T.tolist()) if token == 0]
    bounds = [0, *(end for end in ends if end < len(tokens_T)), len(tokens_T)]
    assert len(bounds) > 3, "several documents; the sequence cuts the outer ones"
    return [slice(*pair) for pair in pairwise(bounds)]


def _decoder(config: Any) -> Decoder:
    values = read_model_config(ModelSpec(config=config))
    layers = values.num_hidden_layers
    (decoder,) = build_stages(values, [StageSlice(0, layers, layers)])
    apply_document_masks(decoder)
    allocate(decoder, torch.device("cpu"))
    first_weights([decoder], None, 0, resumed=False)
    train = TrainSpec(steps=1, global_batch_size=1)
    decoder.loss = TokenLoss(2 * TOKENS, torch.device("cpu"), train)
    return decoder


def _transformers_model(config: Any, decoder: Decoder) -> torch.nn.Module:
    """The same weights in transformers' own model, with its plain attention."""
    values = dict(config)
    own = AutoConfig.for_model(values.pop("model_type"), **values, use_cache=False)
    model = AutoModelForCausalLM.from_config(own, attn_implementation="eager")
    weights = {name: p.detach() for name, p in decoder.plain_parameters()}
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}, "a tied head has the embedding's name"
    return model.train()
