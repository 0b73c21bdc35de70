"""Compiled layers train as one process does with eager layers, on every mesh."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from orchestrator.contract.spec.model_spec import ModelSpec
from orchestrator.contract.spec.train_spec import Checkpointing
from orchestrator.errors import TrainingError
from tests.trainer.launch.tiny_runs import LLAMA, tiny, work
from tests.trainer.launch.training_worker import run_alone
from tests.trainer.parallel.parity_cells import (
    COMPILED,
    COMPILED_MASKED,
    GRAD_NORM,
    LOSS,
    Table,
    difference,
    measure,
)
from trainer.model.build import build_stages, read_model_config
from trainer.model.decoder import Decoder, StageSlice
from trainer.model.init_weights import allocate
from trainer.model.weights import first_weights
from trainer.parallel.activation import apply_activation_checkpointing
from trainer.parallel.compile import compile_layers, compiles_inside_checkpoints

pytestmark = pytest.mark.process
ONE_LAYER = {"config": {**LLAMA, "num_hidden_layers": 1}}


@pytest.mark.slow
def test_compiled_layers_train_like_eager_ones_under_tensor_parallel(tmp_path: Path) -> None:
    one, two = (
        {**tiny(tmp_path / name, steps=3, global_batch_size=4, **changes), "model": ONE_LAYER}
        for name, changes in (("one", {}), ("two", {"compile": True, "parallel": {"tp": 2}}))
    )
    run_alone([{"config": one}])
    work(tmp_path, 2, [{"config": two}])
    found = difference(tmp_path / "two", tmp_path / "one")
    assert found.within(LOSS, GRAD_NORM), found


@pytest.mark.slow
@pytest.mark.timeout(10_000)
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("table", [COMPILED, COMPILED_MASKED], ids=["whole", "in documents"])
def test_every_mesh_trains_compiled_as_one_process_does(
    tmp_path: Path, num_ranks: int, table: Table
) -> None:
    cells = list(measure(tmp_path, num_ranks, all_models=False, table=table))
    wrong = [(c.name, model, found) for c, model, found in cells if not found.within(*c.bounds)]
    assert wrong == []


UNITS_INSIDE = {"dp_shard": 2, "fsdp": {"wrap": "LlamaMLP"}}
MORE: dict[str, dict[str, Any]] = {
    "fsdp units inside": {"parallel": UNITS_INSIDE},
    "fsdp units inside, full": {"parallel": UNITS_INSIDE, "activation_checkpointing": "full"},
    "fsdp units inside, every": {"parallel": UNITS_INSIDE, "activation_checkpointing": "every_k"},
}
MORE_WITH_TP: dict[str, dict[str, Any]] = {
    **{name: {**case, "parallel": {**case["parallel"], "tp": 2}} for name, case in MORE.items()},
    "fsdp, full": {"parallel": {"dp_shard": 2, "tp": 2}, "activation_checkpointing": "full"},
    "ddp": {"parallel": {"data": "ddp", "dp_replicate": 2, "dp_shard": 1, "tp": 2}},
    "zero1": {"parallel": {"data": "zero1", "dp_replicate": 2, "dp_shard": 1, "tp": 2}},
}


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize(("num_ranks", "cases"), [(2, MORE), (4, MORE_WITH_TP)])
def test_more_ways_to_shard_train_compiled_like_one_process(
    tmp_path: Path, num_ranks: int, cases: dict[str, dict[str, Any]]
) -> None:
    run_alone([{"config": tiny(tmp_path / "one")}])
    cells = [tiny(tmp_path / name, compile=True, **changes) for name, changes in cases.items()]
    work(tmp_path, num_ranks, [{"config": cell} for cell in cells], timeout=2400)
    found = {name: difference(tmp_path / name, tmp_path / "one") for name in cases}
    assert {n: d for n, d in found.items() if not d.within(LOSS, GRAD_NORM)} == {}


@pytest.mark.parametrize(
    ("mode", "tp", "units_inside", "inside"),
    [
        ("full", 1, False, False),
        ("full", 2, False, True),
        ("full", 1, True, True),
        ("selective", 2, False, False),
        ("none", 1, True, True),
    ],
)
def test_checkpoints_that_torch_cannot_compile_hold_compiled_layers(
    mode: Checkpointing, tp: int, units_inside: bool, inside: bool
) -> None:
    assert compiles_inside_checkpoints(mode, tp, units_inside) is inside


def test_layers_that_torch_cannot_compile_are_refused() -> None:
    with pytest.raises(TrainingError, match=r"train.compile: .* recomputes by operation"):
        compiles_inside_checkpoints("selective", tp=1, units_inside=True)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore")
def test_modes_by_operation_compile_to_one_graph_and_keep_less() -> None:
    kept = {}
    modes: tuple[Checkpointing, ...] = ("none", "elementwise", "selective", "full")
    for mode in modes:
        torch._dynamo.reset()
        counters.clear()
        kept[mode] = bytes_kept(mode)
        assert counters["stats"]["unique_graphs"] == 1
        assert not counters["graph_break"]
    assert kept["full"] < kept["selective"] < kept["elementwise"] < kept["none"]


def bytes_kept(mode: Checkpointing) -> int:
    """Bytes that compiled layers store for the backward pass, without the weights."""
    values = read_model_config(ModelSpec(config={**LLAMA, "num_hidden_layers": 2}))
    (decoder,) = build_stages(values, [StageSlice(0, 2, 2)])
    apply_activation_checkpointing(decoder, mode, None)
    compile_layers(decoder)
    allocate(decoder, torch.device("cpu"))
    first_weights([decoder], None, 0, resumed=False)
    ids = torch.arange(32).unsqueeze(0)
    decoder.set_positions(ids)
    return stored_bytes(decoder, ids)


def stored_bytes(decoder: Decoder, ids_BT: torch.Tensor) -> int:
    """Bytes that the layers store for the backward pass, without the weights."""
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        decoder(ids_BT).sum().backward()
    weights = {parameter.untyped_storage()._cdata for parameter in decoder.parameters()}
    return sum(size for storage, size in kept.items() if storage not in weights)
