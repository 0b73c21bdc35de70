"""Data-parallel strategies train as one process does, with the expected collectives and memory."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers.pytorch_utils import Conv1D

from orchestrator.contract.codec import decode
from orchestrator.contract.files.trainer_config import TrainingConfig
from orchestrator.contract.spec.model_spec import ModelSpec
from orchestrator.contract.spec.parallel_spec import FsdpSpec
from orchestrator.errors import TrainingError
from tests.trainer.launch.tiny_runs import LLAMA, QWEN3, losses_of, tiny, work
from tests.trainer.parallel.parity_cells import (
    GRAD_NORM,
    GRAD_NORM_BF16,
    LOSS,
    LOSS_BF16,
    Difference,
    difference,
)
from trainer.config import complete
from trainer.model.build import build_stages, read_model_config
from trainer.model.decoder import Decoder, StageSlice
from trainer.model.init_weights import allocate
from trainer.parallel.activation import apply_activation_checkpointing
from trainer.parallel.ddp import autocast
from trainer.parallel.fsdp import outer_units, prefetch, wrap_units
from trainer.parallel.zero1 import Layout, rows

GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 256}
SHARD: dict[str, Any] = {"dp_replicate": 1, "dp_shard": 2, "tp": 1}
COPY: dict[str, Any] = {"dp_replicate": 2, "dp_shard": 1, "tp": 1}
DDP, ZERO1 = {**COPY, "data": "ddp"}, {**COPY, "data": "zero1"}
LARGE_GRADIENTS = "each gradient larger than a bucket"
BF16 = {"dtype": "bfloat16"}
CALM = {"optimizer": {"lr": 1e-3}}
"""At the learning rate 1e-2 of other cases, the gradient jumps and amplifies rounding."""
STEPS, STOP_AFTER = 3, 2
"""The second step shows the first update, the third one the optimizer's moments."""
BATCH, BATCH_OF_FOUR = 4, 8
"""Sequences of a step on two and on four ranks. Micro batches have one, so every strategy
accumulates gradients over two of them."""


def fsdp(**knobs: Any) -> dict[str, Any]:
    return {**SHARD, "fsdp": knobs}


def case(out: Path, **changes: Any) -> dict[str, Any]:
    """A case of the worker, with a model of `vocab` tokens if given. Only a case with `stop_after`
    writes checkpoints, because they take half of a training's time."""
    workers: dict[str, Any] = {
        key: changes.pop(key) for key in ("broken", "count", "stop_after") if key in changes
    }
    workers["unsaved"] = workers.get("stop_after") is None
    vocab = changes.pop("vocab", 256)
    config = tiny(out, **{"micro": 1, "steps": STEPS, "global_batch_size": BATCH, **changes})
    return {
        "config": {
            **config,
            "model": {"config": {**config["model"]["config"], "vocab_size": vocab}},
        },
        **workers,
    }


TWO: dict[str, dict[str, Any]] = {
    "fsdp": {"parallel": SHARD},
    "fsdp without reshard": {"parallel": fsdp(reshard_after_forward=False)},
    "fsdp reducing last": {"parallel": fsdp(reduce_gradients="last")},
    "fsdp offloaded": {"parallel": fsdp(cpu_offload=True)},
    "fsdp without prefetch": {"parallel": fsdp(forward_prefetch=0, backward_prefetch=0)},
    "fsdp prefetching 2": {"parallel": fsdp(forward_prefetch=2, backward_prefetch=2)},
    "fsdp of half layers": {"parallel": fsdp(wrap="LlamaMLP"), "activation_checkpointing": "full"},
    "fsdp with outer units": {
        "parallel": SHARD,
        "broken": "embedding and head too large for the root",
    },
    "ddp": {"parallel": DDP},
    "zero1": {"parallel": ZERO1},
    "ddp without copies": {"parallel": DDP, "broken": LARGE_GRADIENTS},
    "zero1 without copies": {"parallel": ZERO1, "broken": LARGE_GRADIENTS},
}
TWO_UNEVEN: dict[str, dict[str, Any]] = {
    "zero1 of uneven rows": {"parallel": ZERO1, "vocab": 257},
    "zero1 of uneven rows without copies": {
        "parallel": ZERO1,
        "vocab": 257,
        "broken": LARGE_GRADIENTS,
    },
    "fsdp of uneven rows": {"parallel": SHARD, "vocab": 257},
}
ROUNDED: dict[str, dict[str, Any]] = {
    "fsdp in bfloat16": {"parallel": SHARD, **BF16},
    "ddp in bfloat16": {"parallel": DDP, **BF16},
    "zero1 in bfloat16": {"parallel": ZERO1, **BF16},
    "fsdp reducing in bfloat16": {"parallel": SHARD, "reduce_dtype": "bfloat16"},
    "ddp reducing in bfloat16": {"parallel": DDP, "reduce_dtype": "bfloat16"},
    "zero1 reducing in bfloat16": {"parallel": ZERO1, "reduce_dtype": "bfloat16"},
    "ddp reducing large gradients in bfloat16": {
        "parallel": DDP,
        "reduce_dtype": "bfloat16",
        "broken": LARGE_GRADIENTS,
    },
    "fsdp with bfloat16 logits": {"parallel": SHARD, "output_dtype": "bfloat16"},
    "ddp with bfloat16 logits": {"parallel": DDP, "output_dtype": "bfloat16"},
}
BROKEN: dict[str, dict[str, Any]] = {
    "gradients not averaged": {"parallel": DDP},
    "updated rows not gathered": {"parallel": ZERO1},
}
COUNTED = {
    "fsdp": fsdp(reduce_gradients="last"),
    "no reshard": fsdp(reshard_after_forward=False, reduce_gradients="last"),
    "hsdp": COPY,
    "ddp": DDP,
    "zero1": ZERO1,
}
LONGER: dict[str, Any] = {**CALM, "steps": 5, "global_batch_size": 8}
"""In a shorter run, rounded moments change the losses too little to be seen."""
MOMENTS = {**LONGER, "optimizer": {**CALM["optimizer"], "state_dtype": "bfloat16"}}
SWITCHED = {
    "zero1 to fsdp": (ZERO1, SHARD),
    "zero1 to ddp": (ZERO1, DDP),
    "fsdp to zero1": (SHARD, ZERO1),
}
# Cases that the parity table lacks.
FOUR: dict[str, dict[str, Any]] = {
    "reshard to 2 of 4": {
        "parallel": {
            "dp_replicate": 1,
            "dp_shard": 4,
            "fsdp": {"wrap": "Linear", "reshard_after_forward": 2},
        }
    },
    "hsdp, reshard to 1 host": {
        "parallel": {"dp_replicate": 2, "dp_shard": 2, "fsdp": {"reshard_after_forward": 2}}
    },
    "hsdp reducing last": {
        "parallel": {"dp_replicate": 2, "dp_shard": 2, "fsdp": {"reduce_gradients": "last"}}
    },
    "ddp x tp2": {"parallel": {**DDP, "tp": 2}},
    "ddp x tp2 without copies": {"parallel": {**DDP, "tp": 2}, "broken": LARGE_GRADIENTS},
    "zero1 x tp2 without copies": {"parallel": {**ZERO1, "tp": 2}, "broken": LARGE_GRADIENTS},
    "zero1 x tp2, recomputing": {
        "parallel": {**ZERO1, "tp": 2},
        "activation_checkpointing": "selective",
    },
    "offload x tp2": {"parallel": {**fsdp(cpu_offload=True), "tp": 2}},
    "shard 4": {"parallel": {"dp_replicate": 1, "dp_shard": 4}},
}


@dataclass
class Runs:
    """Folder and answers of trainings, by name."""

    folder: Path
    answers: dict[str, dict[str, Any]] = field(default_factory=dict)
    reference: Path = Path()

    def difference(self, name: str, reference: str = "one") -> Difference:
        return difference(self.folder / name, self.reference / reference)

    def do(self, num_ranks: int, cases: dict[str, dict[str, Any]]) -> None:
        wanted = [case(self.folder / name, **changes) for name, changes in cases.items()]
        self.answers |= zip(cases, work(self.folder, num_ranks, wanted), strict=True)


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("one")
    cases: dict[str, dict[str, Any]] = {
        "one": {},
        "one of uneven rows": {"vocab": 257},
        "one learning slowly": CALM,
        "one for longer": LONGER,
        "one for four ranks": {"global_batch_size": BATCH_OF_FOUR},
    }
    Runs(folder).do(1, cases)
    return folder


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory, one: Path) -> Runs:
    runs = Runs(tmp_path_factory.mktemp("two"), reference=one)
    cases = {**TWO, **TWO_UNEVEN}
    cases |= {name: {**changes, **CALM} for name, changes in ROUNDED.items()}
    cases |= {name: {**changes, "broken": name} for name, changes in BROKEN.items()}
    for name, parallel in {**COUNTED, "each": SHARD}.items():
        for micro in (4, 1):
            changes = {"micro": micro, "steps": 1, "global_batch_size": 8}
            counted = {"parallel": parallel, "count": True, **changes}
            cases[f"count {name} {micro}"] = counted
    cases["rounded moments"] = {"parallel": ZERO1, **MOMENTS}
    runs.do(2, cases)
    for part, stop_after in ((0, STOP_AFTER), (1, None)):
        again = {
            name: {"parallel": parallel[part], "stop_after": stop_after}
            for name, parallel in SWITCHED.items()
        }
        resumed = {"parallel": (SHARD, ZERO1)[part], "stop_after": stop_after, **MOMENTS}
        again["rounded moments, from fsdp to zero1"] = resumed
        again["rounded moments, resumed"] = {**resumed, "parallel": ZERO1}
        again["rounded moments, then exact ones"] = {**resumed, **({}, CALM)[part]}
        runs.do(2, again)
    return runs


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory, one: Path) -> Runs:
    runs = Runs(tmp_path_factory.mktemp("four"), reference=one)
    runs.do(4, {k: {**v, "global_batch_size": BATCH_OF_FOUR} for k, v in FOUR.items()})
    return runs


def beyond(runs: Runs, names: Iterable[str], reference: str = "one") -> dict[str, Difference]:
    """The runs of `names` that differ from one process by more than the bounds; the difference."""
    found = {name: runs.difference(name, reference) for name in names}
    return {name: value for name, value in found.items() if not value.within(LOSS, GRAD_NORM)}


@pytest.mark.process
def test_every_strategy_trains_as_one_process(two: Runs) -> None:
    assert beyond(two, TWO) == {}


@pytest.mark.process
def test_uneven_rows_train_too(two: Runs) -> None:
    for name in TWO_UNEVEN:
        assert two.difference(name, "one of uneven rows").within(LOSS, GRAD_NORM), name


@pytest.mark.process
def test_strategies_compose_with_each_other_and_with_tensor_parallel(four: Runs) -> None:
    assert beyond(four, FOUR, "one for four ranks") == {}


@pytest.mark.process
def test_every_dtype_changes_the_losses_and_stays_within_its_bounds(two: Runs) -> None:
    found = {name: two.difference(name, "one learning slowly") for name in ROUNDED}
    wrong = {name: d for name, d in found.items() if not d.within(LOSS_BF16, GRAD_NORM_BF16)}
    assert wrong == {}
    exact = {name: d for name, d in found.items() if d.within(LOSS, GRAD_NORM)}
    assert exact == {}, "nothing is rounded"


@pytest.mark.process
def test_a_broken_strategy_fails_the_parity_check(two: Runs) -> None:
    assert list(beyond(two, BROKEN)) == list(BROKEN)


@pytest.mark.process
@pytest.mark.parametrize("name", COUNTED)
def test_only_the_last_micro_batch_reduces_gradients(two: Runs, name: str) -> None:
    once, four_times = (two.answers[f"count {name} {micro}"]["reduces"] for micro in (4, 1))
    assert once == four_times > 0


@pytest.mark.process
def test_each_micro_batch_reduces_gradients(two: Runs) -> None:
    once, four_times = (two.answers[f"count each {micro}"]["reduces"] for micro in (4, 1))
    assert four_times == 4 * once


@pytest.mark.process
def test_a_run_resumes_with_another_strategy(two: Runs) -> None:
    assert beyond(two, SWITCHED) == {}
    for name in SWITCHED:
        assert list(losses_of(two.folder / name)) == [1, 2, 3]


@pytest.mark.process
def test_rounded_moments_take_half_and_resume_as_they_were(two: Runs) -> None:
    straight, resumed = (
        losses_of(two.folder / name) for name in ("rounded moments", "rounded moments, resumed")
    )
    assert resumed == straight
    moved = "rounded moments, from fsdp to zero1"
    for name in ("rounded moments", moved, "rounded moments, then exact ones"):
        found = two.difference(name, "one for longer")
        assert found.within(LOSS_BF16, GRAD_NORM_BF16), name
        assert found.loss > 1e-6, "nothing is rounded"
    half, whole = (two.answers[name]["optimizer_bytes"] for name in ("rounded moments", "zero1"))
    assert 0.5 <= half / whole < 0.52


@pytest.mark.process
def test_zero1_divides_the_optimizer_state_by_the_ranks(two: Runs) -> None:
    ddp, zero1 = (two.answers[name]["optimizer_bytes"] for name in ("ddp", "zero1"))
    # Each parameter also has a step count of 4 bytes on every rank.
    assert 0.5 <= zero1 / ddp < 0.51


@pytest.mark.process
def test_resharding_to_fewer_ranks_creates_their_groups_once(four: Runs) -> None:
    extra = four.answers["reshard to 2 of 4"]["groups"] - four.answers["shard 4"]["groups"]
    assert 0 < extra <= 4, "two over them and two across, and not for each of 21 units"


def build(config: dict[str, Any] = LLAMA) -> Decoder:
    values = read_model_config(ModelSpec(config=config))
    layers = values.num_hidden_layers
    return build_stages(values, [StageSlice(0, layers, layers)])[0]


@pytest.mark.parametrize("config", [LLAMA, QWEN3, GPT2], ids=lambda c: c["model_type"])
def test_under_autocast_all_that_products_and_residuals_read_is_narrow(
    config: dict[str, Any],
) -> None:
    """As with FSDP, which casts the weights. Gradients are those of the float32 weights."""
    decoder = build(config)
    allocate(decoder, torch.device("cpu"), offload=False)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.normal_(std=0.02)
    autocast(decoder, "bfloat16")
    seen: dict[str, torch.dtype] = {}
    for name, module in decoder.named_modules():
        if isinstance(module, (nn.Linear, Conv1D)) or name in decoder_layers(decoder):
            module.register_forward_pre_hook(
                lambda _module, inputs, kwargs, name=name: seen.update(
                    {name: (*inputs, *kwargs.values())[0].dtype}
                ),
                with_kwargs=True,
            )
    decoder.set_positions(torch.arange(16).unsqueeze(0))
    logits = decoder(torch.arange(16).unsqueeze(0))
    assert len(seen) > 3 * config.get("num_hidden_layers", config.get("n_layer", 0))
    assert {*seen.values(), logits.dtype} == {torch.bfloat16}
    logits.float().sum().backward()
    assert {p.grad.dtype for p in decoder.parameters() if p.grad is not None} == {torch.float32}


def decoder_layers(decoder: Decoder) -> list[str]:
    return [f"{decoder.family.layers}.{number}" for number in decoder.layers]


def test_units_are_decoder_layers_or_modules_of_a_class() -> None:
    decoder = build()
    layers = list(decoder.layers.values())
    assert wrap_units(decoder, "auto") == wrap_units(decoder, "LlamaDecoderLayer") == layers
    assert wrap_units(decoder, "LlamaMLP") == [layer.mlp for layer in layers]


def test_fsdp_units_include_the_wrapper_for_recomputation() -> None:
    decoder = build()
    apply_activation_checkpointing(decoder, "full", None)
    assert wrap_units(decoder, "LlamaDecoderLayer") == list(decoder.layers.values())


def test_an_unknown_class_is_refused_with_the_known_ones() -> None:
    decoder = build()
    apply_activation_checkpointing(decoder, "full", None)
    with pytest.raises(TrainingError, match="no module of the decoder layers is a LlamaBlock") as e:
        wrap_units(decoder, "LlamaBlock")
    there = "Linear, LlamaAttention, LlamaDecoderLayer, LlamaMLP, LlamaRMSNorm"
    assert f"choose one of {there}, or auto" in str(e.value)
    with pytest.raises(TrainingError, match="is a SiLU"):
        wrap_units(decoder, "SiLU")  # It has no weights to gather.


def test_a_large_vocabulary_is_gathered_separately_unless_tied() -> None:
    large = {"vocab_size": 2**15, "hidden_size": 2**10, "num_attention_heads": 4}
    decoder = build({**LLAMA, **large})
    assert outer_units(decoder) == ([[decoder.embedding]], [[decoder.model.norm, decoder.head]])
    assert outer_units(build({**QWEN3, **large})) == outer_units(build()) == ([], [])


class Unit:
    """An FSDP unit that records which units it prefetches."""

    forward: Sequence[Any]
    backward: Sequence[Any]

    def set_modules_to_forward_prefetch(self, modules: Sequence[FSDPModule]) -> None:
        self.forward = modules

    def set_modules_to_backward_prefetch(self, modules: Sequence[FSDPModule]) -> None:
        self.backward = modules


def prefetched(forward: int, backward: int) -> tuple[list[str], list[str]]:
    """What each of the units r (root), a, b and c prefetches, in both directions."""
    units: list[Any] = [Unit() for _ in "rabc"]
    names = dict(zip(units, "rabc", strict=True))
    spec = FsdpSpec(forward_prefetch=forward, backward_prefetch=backward)
    prefetch(units[0], units[1:], spec)
    return (
        ["".join(names[there] for there in unit.forward) for unit in units],
        ["".join(names[there] for there in unit.backward) for unit in units],
    )


def test_units_prefetch_as_many_units_as_configured() -> None:
    assert prefetched(1, 1) == (["a", "b", "c", ""], ["c", "a", "a", "b"])
    assert prefetched(2, 2) == (["ab", "bc", "c", ""], ["cb", "a", "a", "ba"])
    # A unit that lists itself prefetches nothing. With an empty list, torch prefetches one unit.
    assert prefetched(0, 0) == (["", "", "", ""], ["r", "a", "b", "c"])


def test_offloaded_weights_are_on_the_host_and_buffers_on_the_device() -> None:
    decoder = build()
    allocate(decoder, torch.device("meta"), offload=True)
    assert {parameter.device.type for parameter in decoder.parameters()} == {"cpu"}
    assert {buffer.device.type for buffer in decoder.buffers()} == {"meta"}


def test_rows_are_split_as_torch_splits_them() -> None:
    for num_rows, num_ranks in ((8, 4), (5, 4), (3, 4), (9, 2)):
        chunks = torch.arange(num_rows).chunk(num_ranks)
        mine = [
            torch.arange(num_rows)[slice(*rows(num_rows, num_ranks, r))] for r in range(num_ranks)
        ]
        assert [part.tolist() for part in mine if len(part)] == [part.tolist() for part in chunks]


def test_a_flat_buffer_returns_the_rows_of_each_tensor() -> None:
    wholes = [torch.arange(10.0).view(5, 2), torch.arange(3.0)]
    layout = Layout([whole.shape for whole in wholes], 2)
    flats = torch._chunk_cat(wholes, dim=0, num_chunks=2)
    pieces = [layout.pieces(flat, rank) for rank, flat in enumerate(flats)]
    assert [torch.cat(parts).tolist() for parts in zip(*pieces, strict=True)] == [
        whole.tolist() for whole in wholes
    ]


def test_ranks_to_reshard_to_must_divide_the_shards(tmp_path: Path) -> None:
    parallel = fsdp(reshard_after_forward=3)
    config: TrainingConfig = decode(TrainingConfig, tiny(tmp_path / "out", parallel=parallel))
    with pytest.raises(TrainingError, match="reshard_after_forward=3 does not divide the 2 ranks"):
        complete(config, 2)
