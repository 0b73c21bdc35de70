"""Weights are bitwise equal on every mesh: initial ones, ones read from files, and saved ones."""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM

from tests.trainer.checkpoint.checkpoint_launch import differing, save_on, tensors_of
from tests.trainer.launch.tiny_runs import LLAMA, QWEN3, tiny

pytestmark = [pytest.mark.process, pytest.mark.xdist_group("meshes")]

MODELS = ("llama", "qwen3")
MESHES: Mapping[str, tuple[int, dict[str, Any]]] = {
    # Name: (ranks, mesh). Each run resumes from the checkpoint of the run above it.
    "shard2": (2, {"dp_shard": 2}),
    "tp2": (2, {"tp": 2}),
    "replicate2": (2, {"dp_replicate": 2, "dp_shard": 1}),
    "shard2 x tp2": (4, {"dp_shard": 2, "tp": 2}),
    "shard4": (4, {"dp_shard": 4}),
    "replicate2 x tp2": (4, {"dp_replicate": 2, "dp_shard": 1, "tp": 2}),
    "alone": (1, {}),
}
STARTED: Mapping[str, Sequence[str]] = {
    "llama": ("shard2", "tp2", "replicate2 x tp2", "shard4", "alone"),
    "qwen3": ("tp2", "replicate2", "shard2 x tp2", "alone"),
}
"""The meshes on which a model gets fresh weights, and weights of files: each kind with one of the
models, and `tp2` with both, because it splits the tied weight of one of them."""
BIG: dict[str, Any] = {**LLAMA, "hidden_size": 512, "intermediate_size": 2048, "vocab_size": 8192}
"""84 MB, so that the memory to fill it stands out from all other memory of a process."""


@dataclass(frozen=True)
class Saved:
    """The checkpoints of every mesh. `answers` are keyed by mesh and kind of state."""

    folder: Path
    answers: Mapping[tuple[str, str], dict[str, Any]]

    def tensors(self, kind: str, mesh: str) -> dict[str, torch.Tensor]:
        return tensors_of(folder_of(self.folder, kind, mesh) / "checkpoints")

    def source(self, kind: str) -> dict[str, torch.Tensor]:
        tensors: dict[str, torch.Tensor] = {}
        for file in (self.folder / kind).glob("*.safetensors"):
            with safe_open(file, framework="pt") as opened:
                tensors |= {f"model.{name}": opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        return tensors


def folder_of(folder: Path, kind: str, mesh: str) -> Path:
    return folder / f"{kind} on {mesh}"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Run all cases, with one launch for each number of ranks."""
    folder = tmp_path_factory.mktemp("meshes")
    for kind, values in (("files-llama", LLAMA), ("files-qwen3", QWEN3), ("big", BIG)):
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**values))
        model.save_pretrained(folder / kind, max_shard_size="60KB" if kind != "big" else "9MB")
    wanted: dict[int, dict[tuple[str, str], dict[str, Any]]] = {}
    before = dict.fromkeys(MODELS, "trained")
    for mesh, (num_ranks, parallel) in MESHES.items():
        cases = wanted.setdefault(num_ranks, {})
        for model in MODELS:
            if mesh == "shard2":
                config = tiny(folder / f"moved-{model} on trained", model=model, parallel=parallel)
                cases["trained", model] = {"config": config, "stop_after": 3}
            config = tiny(folder / "unused", model=model, parallel=parallel, micro=1)
            config["out"] = str(folder_of(folder, f"moved-{model}", before[model]))
            before[model] = mesh
            cases[mesh, f"moved-{model}"] = saving(
                config, folder_of(folder, f"moved-{model}", mesh)
            )
            config = {**config, "out": str(folder / "nothing")}
            if mesh in STARTED[model]:
                cases[mesh, f"fresh-{model}"] = saving(
                    config, folder_of(folder, f"fresh-{model}", mesh)
                )
                read = {**config, "model": {"path": str(folder / f"files-{model}")}}
                read["model"]["weights"] = read["model"]["path"]
                to = folder_of(folder, f"files-{model}", mesh)
                cases[mesh, f"files-{model}"] = saving(read, to)
        if mesh in ("shard2", "tp2"):
            big = {**config, "model": {"path": str(folder / "big"), "weights": str(folder / "big")}}
            cases[mesh, "big"] = {**saving(big, folder_of(folder, "big", mesh)), "unsaved": True}
    answers: dict[tuple[str, str], dict[str, Any]] = {}
    for num_ranks, cases in wanted.items():
        if num_ranks == 4:
            beside = folder_of(folder, "moved-llama", "tp2"), folder_of(folder, "damaged", "tp2")
            config = damaged_copy(*beside, cases["shard4", "moved-llama"]["config"])
            cases["shard4", "damaged"] = saving(config, folder_of(folder, "damaged", "shard4"))
        answers |= zip(cases, save_on(folder, num_ranks, list(cases.values())), strict=True)
    return Saved(folder, answers)


def damaged_copy(source: Path, to: Path, config: dict[str, Any]) -> dict[str, Any]:
    """A run with the checkpoint of `source` and a newer copy of it in which one bit is flipped."""
    for step in (3, 4):
        shutil.copytree(source / "checkpoints" / "step-3", to / "checkpoints" / f"step-{step}")
    shard = to / "checkpoints" / "step-4" / "__1_0.distcp"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    return {**config, "out": str(to)}


def saving(config: dict[str, Any], to: Path) -> dict[str, Any]:
    return {"config": config, "to": str(to / "checkpoints")}


@pytest.mark.parametrize("model", MODELS)
def test_a_checkpoint_stays_bitwise_equal_from_mesh_to_mesh(saved: Saved, model: str) -> None:
    expected = saved.tensors(f"moved-{model}", "trained")
    assert expected["optimizer.model.norm.weight.step"] == 3
    assert any(name.endswith("exp_avg_sq") and value.any() for name, value in expected.items())
    for mesh in MESHES:
        assert saved.answers[mesh, f"moved-{model}"]["step"] == 3
        assert not differing(saved.tensors(f"moved-{model}", mesh), expected), mesh


def test_all_ranks_skip_a_checkpoint_that_one_rank_finds_damaged(saved: Saved) -> None:
    assert saved.answers["shard4", "damaged"]["step"] == 3
    log = (saved.folder / "ranks-4.log").read_text()
    assert "not using checkpoint step-4: __1_0.distcp has another checksum" in log
    expected = saved.tensors("moved-llama", "trained")
    assert not differing(saved.tensors("damaged", "shard4"), expected)


@pytest.mark.parametrize("model", MODELS)
def test_fresh_weights_are_the_same_on_every_mesh(saved: Saved, model: str) -> None:
    expected = saved.tensors(f"fresh-{model}", "alone")
    for mesh in STARTED[model]:
        assert not differing(saved.tensors(f"fresh-{model}", mesh), expected), mesh


@pytest.mark.parametrize("model", MODELS)
def test_every_mesh_reads_the_weights_of_the_files(saved: Saved, model: str) -> None:
    expected = saved.source(f"files-{model}")
    for mesh in STARTED[model]:
        tensors = saved.tensors(f"files-{model}", mesh)
        weights = {name: value for name, value in tensors.items() if name.startswith("model.")}
        assert not differing(weights, expected), mesh


@pytest.mark.parametrize("mesh", ["shard2", "tp2"])
def test_no_rank_reads_or_holds_the_whole_model(saved: Saved, mesh: str) -> None:
    whole = sum(value.nbytes for value in saved.source("big").values())
    answer = saved.answers[mesh, "big"]
    assert all(read <= 0.51 * whole for read in answer["read_bytes"]), answer
    # A rank holds its half of the model and the file that it is reading.
    assert all(0.4 * whole <= peak <= 0.75 * whole for peak in answer["peak_bytes"]), answer
