"""The planner and the trainer report the same model FLOPs."""

from typing import Any

import pytest
import torch
import transformers
from msgspec.structs import replace
from torch.utils.flop_counter import FlopCounterMode

from orchestrator.contract.mesh import Mesh
from orchestrator.contract.spec.data_spec import DataSpec
from orchestrator.contract.spec.model_spec import LoraSpec
from orchestrator.plan.model.families import shape_of
from orchestrator.plan.model.flops import flops_per_token, recomputed_per_token
from tests.plan.cost.setups import LLAMA_8B, setup
from tests.plan.memory.test_saved import DEEPSEEK, EXPERTS, TOKENS, small
from tests.plan.model.variants import built
from tests.trainer.launch.tiny_runs import LLAMA, QWEN3
from tests.trainer.measure.test_flops import LLAMA_8B as CONFIG_8B
from tests.trainer.measure.test_flops import alone, model
from trainer.measure import flops as trainer_flops


@pytest.mark.parametrize("config", [LLAMA, QWEN3, CONFIG_8B])
def test_planned_flops_equal_those_that_the_trainer_reports(config: dict[str, Any]) -> None:
    assert flops_per_token(shape_of(config), 32) == trainer_flops.flops_per_token(
        [model(config)], alone(), 32
    )


@pytest.mark.parametrize("document", [None, 8, 32, 64])
@pytest.mark.parametrize("masked", [True, False])
def test_plan_and_trainer_count_attention_inside_documents_alike(
    document: int | None, masked: bool
) -> None:
    data = DataSpec(files="a", sequence_length=32, document_mask=masked, document_tokens=document)
    seen = trainer_flops.attended_tokens(data)
    assert seen == (8 if masked and document == 8 else 32)
    planned = flops_per_token(shape_of(LLAMA), 32, None, document if masked else None)
    assert planned == trainer_flops.flops_per_token([model(LLAMA)], alone(), seen)


def test_no_more_tokens_count_than_a_window_or_a_document_has() -> None:
    windowed = replace(LLAMA_8B, window=4096)
    assert flops_per_token(windowed, 131072) == flops_per_token(LLAMA_8B, 4096)
    assert flops_per_token(windowed, 131072, None, 1000) == flops_per_token(LLAMA_8B, 1000)
    assert flops_per_token(replace(LLAMA_8B, window=0), 8192) == flops_per_token(LLAMA_8B, 8192)
    again = recomputed_per_token(setup(tokens=131072, document_tokens=1000, checkpointing="full"))
    assert again == recomputed_per_token(setup(tokens=1000, checkpointing="full"))


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("deepseek_v3", {**DEEPSEEK, "v_head_dim": 24, "num_hidden_layers": 2}),
        ("deepseek_v3", {**DEEPSEEK, "first_k_dense_replace": 1, "num_hidden_layers": 3}),
        ("deepseek_v2", {**DEEPSEEK, "q_lora_rank": None}),
        ("qwen2_moe", {**EXPERTS, "num_experts": 8, "shared_expert_intermediate_size": 192}),
        ("opt", {}),
        ("bloom", {}),
        ("falcon", {"num_kv_heads": 8, "new_decoder_architecture": True}),
        ("gpt_bigcode", {"attn_pdrop": 0.0}),
        ("youtu", {key: DEEPSEEK[key] for key in DEEPSEEK if key.endswith(("rank", "dim"))}),
        ("afmoe", {**EXPERTS, "num_experts": 8, "num_dense_layers": 0, "head_dim": 32}),
        ("gpt_oss", {"head_dim": 32, "num_local_experts": 8, "num_experts_per_tok": 4}),
    ],
)
def test_planned_flops_are_those_that_torch_counts(kind: str, sizes: dict[str, Any]) -> None:
    """Forward and backward, with a score for each pair of tokens. Weights of norms and biases are
    no products, but count as parameters."""
    config = small(kind, sizes)
    read = built(config)
    read._attn_implementation = read._experts_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(read)  # type: ignore[no-untyped-call]
    with FlopCounterMode(display=False) as counted:
        inputs = torch.zeros((1, TOKENS), dtype=torch.long)
        model(input_ids=inputs, use_cache=False).logits.sum().backward()
    planned = flops_per_token(shape_of(config), TOKENS)
    assert planned == pytest.approx(counted.get_total_flops() / TOKENS, rel=0.01)


def test_frozen_weights_need_two_thirds_of_the_flops() -> None:
    full, frozen = (flops_per_token(LLAMA_8B, 0, lora) for lora in (None, LoraSpec(rank=1)))
    assert frozen / full == pytest.approx(2 / 3, rel=1e-3)


def test_recomputation_repeats_all_but_the_last_product_of_a_layer() -> None:
    """A repeated forward pass of the whole model would be a third of the FLOPs."""
    model = flops_per_token(LLAMA_8B, 8192)
    full = recomputed_per_token(setup(checkpointing="full"))
    assert 0.24 < full / model < 0.26
    products = LLAMA_8B.layer_matrices - 4096 * 14336
    attention = 4 * LLAMA_8B.query_size * 8192
    assert full == LLAMA_8B.num_layers * (2 * products + attention)
    every = recomputed_per_token(setup(checkpointing="every_k", checkpoint_every=4))
    assert every == full / 4
    assert recomputed_per_token(setup()) == recomputed_per_token(setup(checkpointing="none")) == 0


def test_recomputation_by_operation_repeats_few_products() -> None:
    full = recomputed_per_token(setup(checkpointing="full"))
    selective = recomputed_per_token(setup(checkpointing="selective"))
    # The query, value and gate projections: every second of the first six products.
    assert 0 < selective < full / 2
    assert recomputed_per_token(setup(checkpointing="elementwise")) == 0
    # With tp the output projection is repeated too, because only its scattered result is kept.
    split = setup(checkpointing="elementwise", mesh=Mesh(tp=2))
    assert recomputed_per_token(split) == LLAMA_8B.num_layers * 2 * 4096 * 4096
