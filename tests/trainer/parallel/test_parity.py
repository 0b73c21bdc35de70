"""Every mesh trains as one process does: same losses, same gradient norms."""

from pathlib import Path
from typing import Any

import pytest

from tests.trainer.trainer_launch import metrics_of, tiny, work

pytestmark = pytest.mark.process

LOSS, GRAD_NORM = 1e-5, 1e-4
"""Bounds of parity in float32: absolute for the loss, relative for the gradient norm."""

MESHES: dict[int, dict[str, dict[str, int]]] = {
    2: {"tp2": {"tp": 2}, "shard2": {"dp_shard": 2}, "replicate2": {"dp_replicate": 2}},
    4: {
        "replicate2 x shard2": {"dp_replicate": 2, "dp_shard": 2},
        "shard2 x tp2": {"dp_shard": 2, "tp": 2},
        "replicate2 x tp2": {"dp_replicate": 2, "tp": 2},
    },
}
ALTERNATIVES: dict[str, dict[str, Any]] = {
    "full recompute": {"activation_checkpointing": "full"},
    "selective recompute": {"activation_checkpointing": "selective"},
    "recompute every k": {"activation_checkpointing": "every_k"},
    "micro batch of 1": {"micro": 1},
    "no clipping": {"grad_clip": None},
}


def difference(out: Path, reference: Path) -> tuple[float, float]:
    """Largest distance of losses, and largest relative distance of gradient norms."""
    pairs = list(zip(metrics_of(out), metrics_of(reference), strict=True))
    losses = max(abs(a["loss"] - b["loss"]) for a, b in pairs)
    norms = max(abs(a["grad_norm"] / b["grad_norm"] - 1) for a, b in pairs)
    return losses, norms


def is_parity(found: tuple[float, float]) -> bool:
    return found[0] <= LOSS and found[1] <= GRAD_NORM


def references(tmp_path: Path, **changes: Any) -> dict[str, Path]:
    outs = {model: tmp_path / f"one-{model}" for model in ("llama", "qwen3")}
    work(tmp_path, 1, [{"config": tiny(out, model=m, **changes)} for m, out in outs.items()])
    return outs


@pytest.mark.parametrize("num_ranks", MESHES)
def test_every_mesh_trains_as_one_process(tmp_path: Path, num_ranks: int) -> None:
    expected = references(tmp_path)
    cells = {
        (model, name): tiny(tmp_path / f"{model} {name}", model=model, parallel=mesh)
        for model in expected
        for name, mesh in MESHES[num_ranks].items()
    }
    work(tmp_path, num_ranks, [{"config": config} for config in cells.values()])
    found = {
        cell: difference(Path(config["out"]), expected[cell[0]]) for cell, config in cells.items()
    }
    assert all(is_parity(value) for value in found.values()), found


def test_recomputing_and_accumulating_change_nothing(tmp_path: Path) -> None:
    expected = references(tmp_path, grad_clip=None)["llama"]
    cells = {
        name: tiny(tmp_path / name, **{"parallel": {"dp_shard": 2}, "grad_clip": None, **changes})
        for name, changes in ALTERNATIVES.items()
    }
    mixed = tiny(tmp_path / "bf16", parallel={"dp_shard": 2}, dtype="bfloat16", grad_clip=None)
    work(tmp_path, 2, [{"config": config} for config in [*cells.values(), mixed]])
    found = {name: difference(Path(config["out"]), expected) for name, config in cells.items()}
    assert all(is_parity(value) for value in found.values()), found
    loss, norm = difference(tmp_path / "bf16", expected)
    assert LOSS < loss < 0.05, "bfloat16 computes with less precision, and really does"
    assert norm < 0.2


def test_a_broken_plan_fails_the_parity_check(tmp_path: Path) -> None:
    expected = references(tmp_path)["qwen3"]
    broken: dict[str, dict[str, int]] = {
        "summands of a norm's gradient not added up": {"tp": 2},
        "all ranks read the same": {"dp_shard": 2},
    }
    cases = [
        {"config": tiny(tmp_path / name, model="qwen3", parallel=mesh), "broken": name}
        for name, mesh in broken.items()
    ]
    work(tmp_path, 2, cases)
    found = {name: difference(tmp_path / name, expected) for name in broken}
    assert not any(is_parity(value) for value in found.values()), found


def test_only_the_last_micro_batch_reduces_gradients(tmp_path: Path) -> None:
    cases = [
        {
            "config": tiny(
                tmp_path / f"micro-{micro}", parallel={"dp_shard": 2}, micro=micro, steps=1
            ),
            "count": True,
        }
        for micro in (4, 1)
    ]
    once, four_times = work(tmp_path, 2, cases)
    assert once["reduces"] > 0
    assert four_times["reduces"] == once["reduces"]


@pytest.mark.slow
def test_compiled_layers_train_as_eager_ones(tmp_path: Path) -> None:
    expected = references(tmp_path)
    for model, reference in expected.items():
        out = tmp_path / f"compiled-{model}"
        config = tiny(out, model=model, parallel={"dp_shard": 2}, compile=True)
        work(tmp_path, 2, [{"config": config}])
        assert is_parity(difference(out, reference)), model
