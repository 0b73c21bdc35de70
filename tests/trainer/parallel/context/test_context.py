"""Context parallel: the tokens of each rank, what is refused, and the results of attention."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from orchestrator.contract.mesh import Mesh
from orchestrator.contract.spec.model_spec import ModelSpec
from orchestrator.errors import TrainingError
from tests.trainer.launch.tiny_runs import LLAMA, tiny, work
from tests.trainer.parallel.parity_cells import GRAD_NORM, LOSS, difference
from trainer.model.build import read_model_config
from trainer.parallel.context import (
    Method,
    check_context_parallel,
    check_document_masks,
    local_positions,
)
from trainer.parallel.context.gather import by_rank, in_sequence, parts_beyond_own
from trainer.parallel.context.ring import part_at

METHODS: tuple[Method, ...] = ("ring", "ulysses", "all_gather")
GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 1, "n_head": 3, "vocab_size": 256}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("cp", [1, 2, 3, 8])
def test_every_token_belongs_to_one_rank(method: Method, cp: int) -> None:
    dealt = torch.cat([local_positions(48, method, cp, rank) for rank in range(cp)])
    assert sorted(dealt.tolist()) == list(range(48))


def test_zigzag_gives_an_early_chunk_and_a_late_one() -> None:
    assert local_positions(8, "ring", 2, 0).tolist() == [0, 1, 6, 7]
    assert local_positions(8, "all_gather", 2, 1).tolist() == [2, 3, 4, 5]
    assert local_positions(8, "ulysses", 2, 1).tolist() == [4, 5, 6, 7]


@pytest.mark.parametrize("cp", [2, 3, 4])
def test_ring_and_all_gather_parts_add_up_to_the_causal_mask(cp: int) -> None:
    tokens = 6
    order = [local_positions(tokens * cp, "ring", cp, rank) for rank in range(cp)]
    for rank in range(cp):
        ring, gathered = torch.zeros(2, tokens, tokens * cp, dtype=torch.long)
        for hop in range(cp):
            part = part_at(hop, rank, cp, tokens)
            seen = torch.ones(tokens, tokens, dtype=torch.long)
            if part.causal:
                seen = seen.tril()
            keys = order[(rank - hop) % cp][part.keys]
            ring[part.queries, keys] += seen[part.queries, part.keys]
        gathered[:, order[rank]] += torch.ones(tokens, tokens, dtype=torch.long).tril()
        for part in parts_beyond_own(rank, cp, tokens):
            gathered[part.queries, part.keys] += 1
        # Each key once, and none that comes later.
        expected = (order[rank][:, None] >= torch.arange(tokens * cp)).long()
        assert torch.equal(ring, expected)
        assert torch.equal(gathered, expected)


def test_gathered_chunks_are_sorted_into_sequence_order() -> None:
    ranks = [local_positions(12, "all_gather", 3, rank).float() for rank in range(3)]
    stacked = torch.stack(ranks).view(3, 1, 1, 1, 4, 1).expand(3, 2, 1, 1, 4, 5)
    whole = in_sequence(stacked)
    assert whole[1, 0, 0, :, 3].tolist() == list(range(12))
    assert torch.equal(by_rank(whole, 3), stacked)


def refused(config: dict[str, Any], method: Method, tokens: int, **degrees: int) -> str:
    values = read_model_config(ModelSpec(config=config))
    with pytest.raises(TrainingError) as caught:
        check_context_parallel(values, method, Mesh(**degrees), tokens)
    return str(caught.value)


def test_all_reasons_against_context_parallel_are_reported_at_once() -> None:
    told = refused(GPT2, "ulysses", 33, cp=2)
    assert "data.sequence_length is 33" in told
    assert "multiple of 2" in told
    assert "cp does not divide the 3 attention heads" in told
    assert "attn_pdrop is 0.1" in told


@pytest.mark.parametrize(
    ("method", "degrees", "tokens", "unit"),
    [
        ("ulysses", {"cp": 4}, 30, 4),
        ("ring", {"cp": 4}, 36, 8),
        ("all_gather", {"cp": 2, "tp": 3}, 36 + 6, 12),
        ("ulysses", {"cp": 2, "tp": 2}, 34, 4),
        ("ring", {"cp": 4}, 6, 8),
    ],
)
def test_tokens_must_be_divisible(
    method: Method, degrees: dict[str, int], tokens: int, unit: int
) -> None:
    sizes = {"num_attention_heads": 12, "num_key_value_heads": 12}
    told = refused({**LLAMA, "hidden_size": 48, **sizes}, method, tokens, **degrees)
    assert f"needs a multiple of {unit}" in told
    assert f"set data.sequence_length to {max(unit, tokens // unit * unit)}" in told
    values = read_model_config(ModelSpec(config={**LLAMA, "hidden_size": 48, **sizes}))
    check_context_parallel(values, method, Mesh(**degrees), 4 * unit)


def test_only_ulysses_limits_the_number_of_heads() -> None:
    many = {"hidden_size": 96, "num_attention_heads": 12}
    for kv_heads, cp in ((3, 2), (3, 4), (2, 3)):
        config = {**LLAMA, **many, "num_key_value_heads": kv_heads}
        told = refused(config, "ulysses", 48, cp=cp)
        assert f"is a multiple of the {kv_heads} kv heads" in told
        assert "set parallel.context to ring" in told
        check_context_parallel(read_model_config(ModelSpec(config=config)), "ring", Mesh(cp=cp), 48)
    values = read_model_config(ModelSpec(config={**LLAMA, **many, "num_key_value_heads": 2}))
    for degrees in ({"cp": 2}, {"cp": 4}, {"cp": 6, "tp": 2}):
        check_context_parallel(values, "ulysses", Mesh(**degrees), 48)


def test_document_masks_exclude_dropout() -> None:
    with pytest.raises(
        TrainingError, match=r"data\.document_mask is not possible: attn_pdrop is 0\.1"
    ):
        check_document_masks(read_model_config(ModelSpec(config=GPT2)))
    check_document_masks(read_model_config(ModelSpec(config=LLAMA)))


def test_limits_of_context_parallel_do_not_apply_without_it() -> None:
    values = read_model_config(ModelSpec(config=GPT2))
    check_context_parallel(values, "ring", Mesh(tp=2), 33)


PRECISION = {"float64": 1e-13, "float32": 1e-5, "bfloat16": 0.1}
"""Largest error of results and gradients, whose entries are around 1."""
BASE = 64
"""Tokens of a short sequence."""


def attention(**changes: Any) -> dict[str, Any]:
    sizes = {"tokens": 48, "heads": 4, "kv_heads": 2, "dtype": "float64"}
    return {"measure": "attention", "cp": 2, "method": "ring", **sizes, **changes}


def saved(**changes: Any) -> dict[str, Any]:
    return {"measure": "saved", "cp": 2, "method": "ring", "tokens": BASE, **changes}


ATTENTION = [
    attention(method=method, cp=cp, kv_heads=kv_heads, dtype=dtype)
    for method in METHODS
    for cp in (2, 4)
    for dtype in PRECISION
    for kv_heads in ((4, 2, 1) if dtype == "float64" else (2,))
]
DOCUMENTS = [[5, 1, 22, 2, 18], [48]]
"""Lengths: some cross the ends of chunks, and one covers all."""
BROKEN_PARTS = (
    "blocks averaged without weights",
    "a key is never seen",
    "tokens distributed in order",
)
IN_DOCUMENTS = [
    *(attention(method=method, cp=cp, documents=DOCUMENTS) for method in METHODS for cp in (2, 4)),
    *(attention(cp=cp, dtype="bfloat16", documents=DOCUMENTS) for cp in (1, 2)),
    attention(cp=1, kv_heads=1, documents=DOCUMENTS),
]
BROKEN = [
    attention(broken="a document is one key short", documents=DOCUMENTS),
    *(attention(broken=name) for name in BROKEN_PARTS),
]
WHOLE = [saved(cp=1), saved(cp=1, tokens=32 * BASE)]
PARTS = [saved(cp=cp, method=m, tokens=32 * BASE) for cp in (2, 4) for m in METHODS]
RECOMPUTED = [saved(recompute=mode) for mode in ("none", "selective", "full")]

Measure = Callable[[list[dict[str, Any]]], list[dict[str, float]]]


@pytest.fixture(scope="module")
def measure(tmp_path_factory: pytest.TempPathFactory) -> Measure:
    """Runs cases of `context_worker.py`; all of them in one launch of four ranks."""
    folder = tmp_path_factory.mktemp("context")
    cases = [*ATTENTION, *IN_DOCUMENTS, *BROKEN, *WHOLE, *PARTS, *RECOMPUTED]
    answers = work(folder, 4, cases, worker="tests.trainer.parallel.context.context_worker")
    return lambda asked: [answers[cases.index(case)] for case in asked]


one_launch = pytest.mark.xdist_group("context parallel")


@pytest.mark.process
@one_launch
@pytest.mark.parametrize("cases", [ATTENTION, IN_DOCUMENTS], ids=["whole", "in documents"])
def test_attention_over_ranks_equals_that_of_one_process(
    measure: Measure, cases: list[dict[str, Any]]
) -> None:
    for case, errors in zip(cases, measure(cases), strict=True):
        assert set(errors) == {"out", "q", "k", "v"}
        assert all(error < PRECISION[case["dtype"]] for error in errors.values()), (case, errors)


@pytest.mark.process
@one_launch
def test_broken_attention_fails_the_check(measure: Measure) -> None:
    for case, errors in zip(BROKEN, measure(BROKEN), strict=True):
        assert all(error > 0.01 for error in errors.values()), (case, errors)


@pytest.mark.process
@one_launch
def test_memory_grows_linearly_for_a_sequence_32_times_as_long(measure: Measure) -> None:
    short, whole = measure(WHOLE)
    # On one process no kept tensor grows with the square of the length either.
    assert whole["bytes"] < 33 * short["bytes"]
    for case, part in zip(PARTS, measure(PARTS), strict=True):
        share = part["bytes"] / whole["bytes"] * case["cp"]
        # Ulysses keeps its result twice, before and after the exchange of heads.
        assert 0.99 < share < (1.12 if case["method"] == "ulysses" else 1.01), (case, share)
        assert part["squares"] == 0, case


@pytest.mark.process
@one_launch
def test_selective_recomputation_does_not_repeat_sends(measure: Measure) -> None:
    none, selective, full = measure(RECOMPUTED)
    # Three layers. Keys take one hop in the forward pass. In the backward pass keys take one hop
    # again, and their gradients take two.
    assert [answer["sends"] for answer in (none, selective, full)] == [12, 12, 15]


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_compiled_layers_train_as_one_process_does(tmp_path: Path) -> None:
    def config(name: str, parallel: dict[str, Any], **train: Any) -> dict[str, Any]:
        changed = tiny(tmp_path / name, parallel={"dp_shard": 1, **parallel}, **train)
        return {**changed, "model": {"config": {**LLAMA, "num_hidden_layers": 2}}}

    work(tmp_path, 1, [{"config": config("one", {})}])
    # The third method is an operator as the ring is.
    methods = ("ring", "ulysses")
    cases = [config(m, {"cp": 2, "context": m}, compile=True) for m in methods]
    work(tmp_path, 2, [{"config": case} for case in cases], timeout=500)
    found = {method: difference(tmp_path / method, tmp_path / "one") for method in methods}
    assert all(value.within(LOSS, GRAD_NORM) for value in found.values()), found
