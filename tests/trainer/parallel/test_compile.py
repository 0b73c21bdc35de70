"""Compiled layers train like eager ones with every data-parallel strategy."""

from pathlib import Path
from typing import Any

import pytest

from tests.trainer.launch.tiny_runs import tiny, work
from tests.trainer.parallel.parity_cells import GRAD_NORM, LOSS, difference

SHARD: dict[str, Any] = {"dp_replicate": 1, "dp_shard": 2, "tp": 1}
COPY: dict[str, Any] = {"dp_replicate": 2, "dp_shard": 1, "tp": 1}
COMPILED: dict[str, dict[str, Any]] = {
    "fsdp": {"parallel": SHARD},
    "fsdp without reshard": {"parallel": {**SHARD, "fsdp": {"reshard_after_forward": False}}},
    "hsdp": {"parallel": COPY},
    "ddp": {"parallel": {**COPY, "data": "ddp"}},
    "zero1": {"parallel": {**COPY, "data": "zero1"}},
    "full recompute": {"parallel": SHARD, "activation_checkpointing": "full"},
    "selective recompute": {"parallel": SHARD, "activation_checkpointing": "selective"},
}
UNITS_INSIDE: dict[str, Any] = {"parallel": {**SHARD, "fsdp": {"wrap": "LlamaMLP"}}}


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("model", ["llama", "qwen3"])
def test_compiled_layers_train_like_eager_ones(tmp_path: Path, model: str) -> None:
    one = tiny(tmp_path / "one", model=model)
    work(tmp_path, 1, [{"config": one}], timeout=400)
    cells = {
        name: tiny(tmp_path / name, model=model, compile=True, **changes)
        for name, changes in {
            **COMPILED,
            **({"inside": UNITS_INSIDE} if model == "llama" else {}),
        }.items()
    }
    work(tmp_path, 2, [{"config": config} for config in cells.values()], timeout=2400)
    found = {name: difference(Path(cell["out"]), Path(one["out"])) for name, cell in cells.items()}
    assert {n: d for n, d in found.items() if not d.within(LOSS, GRAD_NORM)} == {}
