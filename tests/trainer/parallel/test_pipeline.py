"""Pipelines: evaluation, copies of tied matrices, and checkpoints. Losses are in test_parity."""

from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint.filesystem import FileSystemReader

from tests.trainer.launch.tiny_runs import losses_of, tiny, work
from tests.trainer.parallel.parity_cells import (
    GRAD_NORM,
    GRAD_NORM_BF16,
    LOSS,
    LOSS_BF16,
    deeper,
    difference,
)

pytestmark = pytest.mark.process

MODEL = {**deeper("qwen3"), "num_hidden_layers": 5}
"""Head and embedding are tied, and five layers cannot be split evenly."""

CELLS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gpipe": ({"pp": 4}, {}),
    "1f1b, kept gathered": ({"dp_shard": 2, "fsdp": {"reshard_after_forward": False}}, {}),
    "1f1b, bfloat16": ({"dp_replicate": 2, "data": "ddp"}, {"dtype": "bfloat16"}),
    "interleaved_1f1b": ({"tp": 2}, {}),
    "zbv, zero1": ({"dp_replicate": 2, "data": "zero1"}, {}),
    "zbv, recompute": ({"dp_shard": 2}, {"activation_checkpointing": "full"}),
}
"""Name -> keys of `parallel` and of `train`."""


def config_of(out: Path, parallel: dict[str, Any], **train: Any) -> dict[str, Any]:
    degrees = {"dp_shard": 1, "tp": 1}
    config = tiny(out, micro=1, parallel={**degrees, **parallel}, **train)
    return {**config, "model": {"config": MODEL}}


def cell_of(tmp_path: Path, name: str) -> dict[str, Any]:
    parallel, train = CELLS[name]
    pipeline = {"schedule": name.partition(",")[0]}
    return config_of(tmp_path / name, {"pp": 2, "pipeline": pipeline, **parallel}, steps=3, **train)


@pytest.mark.slow
def test_evaluation_equals_the_forward_pass_and_copies_stay_equal(tmp_path: Path) -> None:
    work(tmp_path, 1, [{"config": config_of(tmp_path / "one", {}, steps=3)}])
    cases = [{"config": cell_of(tmp_path, name)} for name in CELLS]
    worker = "tests.trainer.parallel.pipeline_worker"
    answers = work(tmp_path, 4, cases, worker=worker)
    for name, ranks in zip(CELLS, answers, strict=True):
        found = difference(tmp_path / name, tmp_path / "one")
        bounds = (LOSS_BF16, GRAD_NORM_BF16) if "bfloat16" in name else (LOSS, GRAD_NORM)
        assert found.within(*bounds), (name, found)
        assert any(step["trained"][1] for rank in ranks for step in rank)
        for step in (step for rank in ranks for step in rank):
            assert step["left_gathered"] == 0, name
            assert step["evaluated"] == pytest.approx(step["trained"], rel=1e-6), name
        assert copies_are_equal(ranks, CELLS[name][0].get("pp", 2)), name


def copies_are_equal(ranks: list[list[dict[str, Any]]], pp: int) -> bool:
    """Whether the two copies, on ranks that differ only in pp, are equal in each step. The copies
    must also change with each step.
    """
    apart = len(ranks) // pp
    for place in range(apart):
        steps = zip(*ranks[place::apart], strict=True)
        copies = [[copy for rank in step for copy in rank["copies"]] for step in steps]
        if any(len(pair) != 2 or pair[0] != pair[1] for pair in copies):
            return False
        if len({pair[0] for pair in copies}) != len(copies):
            return False
    return True


def test_a_checkpoint_of_a_pipeline_resumes_on_any_mesh_and_back(tmp_path: Path) -> None:
    whole, out = config_of(tmp_path / "whole", {}, steps=5), tmp_path / "moved"
    zbv: dict[str, Any] = {"pp": 2, "pipeline": {"schedule": "zbv"}}
    meshes = [(zbv, 1), ({"dp_shard": 2}, 2), ({"pp": 2}, 3), (zbv, 4)]
    parts = [
        {"config": config_of(out, parallel, steps=5), "stop_after": stop}
        for parallel, stop in meshes
    ]
    work(tmp_path, 2, parts)
    metadata = FileSystemReader(out / "checkpoints" / "step-4").read_metadata()
    work(tmp_path, 1, [{"config": whole}, {"config": config_of(out, {}, steps=5)}])
    expected = losses_of(tmp_path / "whole")
    assert losses_of(out) == pytest.approx(expected, abs=LOSS)
    saved = {name for name in metadata.state_dict_metadata if name.startswith("model.")}
    assert not any("lm_head" in name for name in saved)
    tied: Any = metadata.state_dict_metadata["model.model.embed_tokens.weight"]
    assert [list(chunk.sizes) for chunk in tied.chunks] == [[256, 32]]
