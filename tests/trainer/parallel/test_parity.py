"""Every mesh and method trains as one process does, with the same losses and gradient norms."""

from pathlib import Path

import pytest

from tests.trainer.launch.tiny_runs import work
from tests.trainer.launch.training_worker import run_alone
from tests.trainer.parallel.parity_cells import (
    ALL_LAYERS,
    ALL_MASKED,
    GRAD_NORM,
    GRAD_NORM_BF16,
    LOSS,
    LOSS_BF16,
    MASKED,
    Cell,
    Difference,
    batch_of,
    difference,
    measure,
    parity_config,
    train_one_process,
    unsaved,
)

pytestmark = pytest.mark.process


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("num_ranks", "all_models"),
    [
        pytest.param(2, False, id="2"),
        pytest.param(4, False, id="4"),
        *(pytest.param(n, True, id=f"{n}, all models", marks=pytest.mark.slow) for n in (2, 4, 8)),
    ],
)
def test_every_mesh_trains_as_one_process(tmp_path: Path, num_ranks: int, all_models: bool) -> None:
    cells = list(measure(tmp_path, num_ranks, all_models=all_models))
    wrong = [(c.name, model, found) for c, model, found in cells if not found.within(*c.bounds)]
    assert wrong == []
    rounded = [found.loss for cell, _, found in cells if cell.bounds == (LOSS_BF16, GRAD_NORM_BF16)]
    assert all(loss > LOSS for loss in rounded), "bfloat16 computes with less precision"


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_every_mesh_attends_inside_documents_as_one_process(tmp_path: Path, num_ranks: int) -> None:
    cells = list(measure(tmp_path, num_ranks, all_models=True, table=ALL_MASKED))
    wrong = [(c.name, model, found) for c, model, found in cells if not found.within(*c.bounds)]
    assert wrong == []


BROKEN = {
    "summands of a norm's gradient not added up": {"tp": 2, "dp_shard": 1},
    "all ranks read the same": {"dp_shard": 2, "tp": 1},
    "a ring's tokens distributed in order": {"cp": 2, "dp_shard": 1, "tp": 1},
    "tied gradients not added up": {"pp": 2, "dp_shard": 1, "tp": 1},
}


def test_a_broken_axis_fails_the_parity_check(tmp_path: Path) -> None:
    expected = train_one_process(tmp_path, [("qwen3", ALL_LAYERS)])["qwen3", ALL_LAYERS]
    batch = {"global_batch_size": batch_of(2)}
    cases = []
    for name, parallel in BROKEN.items():
        whole = parity_config(tmp_path / f"{name}, intact", "qwen3", parallel, batch)
        cut = parity_config(tmp_path / name, "qwen3", parallel, batch)
        cases += [unsaved(whole), {**unsaved(cut), "broken": name}]
    work(tmp_path, 2, cases)
    intact = {name: difference(tmp_path / f"{name}, intact", expected) for name in BROKEN}
    assert all(value.within(LOSS, GRAD_NORM) for value in intact.values()), intact
    found = {name: difference(tmp_path / name, expected) for name in BROKEN}
    assert not any(value.within(LOSS, GRAD_NORM) for value in found.values()), found


def test_rounding_alone_explains_the_differences_with_document_masks(tmp_path: Path) -> None:
    """Adam divides each gradient by its own size plus `eps`, so it also takes a step of full length
    where a gradient is only a rounding error. The sentence beside the table says so."""
    found = {}
    for eps in (1e-8, 1e-3):
        changes = {"global_batch_size": 4, "steps": 3, "optimizer": {"lr": 1e-2, "eps": eps}}
        one, other = (
            parity_config(tmp_path / f"{name} {eps}", f"qwen3{MASKED}", {}, changes)
            for name in ("one", "other")
        )
        run_alone([unsaved(one), {**unsaved(other), "broken": "gradients rounded otherwise"}])
        found[eps] = difference(tmp_path / f"other {eps}", tmp_path / f"one {eps}")
    assert 1e-6 < found[1e-8].loss < 3e-5, found
    assert found[1e-3].loss < 2e-7, found


def test_nan_is_out_of_bounds() -> None:
    cell = Cell("any", 2, {})
    assert not Difference(float("nan"), 0.0).within(*cell.bounds)
    assert not Difference(0.0, float("nan")).within(*cell.bounds)
