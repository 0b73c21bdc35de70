"""Ranks of another mesh read a checkpoint in memory: bit by bit what the disk has of that step."""

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from orchestrator.agent.memory.slots import MemorySlots, paths
from orchestrator.contract.codec import encode
from orchestrator.contract.files import exit_codes
from orchestrator.contract.memory.peers import CopyPlan
from tests.agent.processes.test_torchrun import START
from tests.trainer.checkpoint.checkpoint_launch import differing, tensors_of
from tests.trainer.launch.tiny_runs import tiny, work

pytestmark = pytest.mark.process

WORKER = "tests.trainer.checkpoint.memory.other_mesh_worker"
SHARD2, SHARD4, PIPELINE = {"dp_shard": 2}, {"dp_shard": 4}, {"pp": 2, "dp_shard": 2}
TENSOR, REPLICAS = {"tp": 2, "dp_shard": 2}, {"dp_replicate": 2, "dp_shard": 2}
CASES: Mapping[str, tuple[str, int, dict[str, Any], int, dict[str, Any]]] = {
    # Name: model, ranks and mesh before, ranks and mesh after.
    "tensor parallel, fewer ranks": ("qwen3", 4, TENSOR, 2, SHARD2),
    "no pipeline": ("llama", 4, PIPELINE, 4, SHARD4),
    "no replicas": ("qwen3", 4, REPLICAS, 4, TENSOR),
    "more ranks": ("llama", 2, SHARD2, 4, PIPELINE),
}


@dataclass
class Case:
    folder: Path
    model: str
    owner: MemorySlots = field(default_factory=MemorySlots)
    """Plays the agent."""

    def memory(self, ranks: int, attempt: int) -> str:
        start = replace(START, attempt=attempt, nodes=1, ranks_per_host=ranks, lineage=1)
        memory = self.owner.of_attempt(start, CopyPlan())
        return json.dumps(encode(replace(memory, others=paths(self.owner.others))))

    def config(self, out: Path, mesh: dict[str, Any]) -> dict[str, Any]:
        kept = {"every_steps": 1, "keep": 9, "memory": {"every": 1}}
        config = tiny(out, model=self.model, parallel=mesh, micro=1, checkpoint=kept)
        return {**config, "out": str(out)}


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, Case]]:
    folder = tmp_path_factory.mktemp("other")
    made = {
        name: Case(folder / f"case {number}", CASES[name][0]) for number, name in enumerate(CASES)
    }
    for count in (2, 4):
        train(folder, {name: made[name] for name in CASES if CASES[name][1] == count})
    for count in (2, 4):
        load(folder, {name: made[name] for name in CASES if CASES[name][3] == count})
    yield made
    for case in made.values():
        case.owner.close()


def train(folder: Path, cases: Mapping[str, Case]) -> None:
    """Three steps, each saved in memory and on the disk."""
    asked = []
    for name, case in cases.items():
        _, count, mesh, _, _ = CASES[name]
        config, memory = case.config(case.folder / "before", mesh), case.memory(count, 1)
        asked.append({"config": config, "stop_after": 3, "attempt": 1, "memory": memory})
    answers = work(folder, CASES[name][1], asked, worker=WORKER)
    assert {one["code"] for one in answers} == {exit_codes.CHECKPOINTED}


def load(folder: Path, cases: Mapping[str, Case]) -> None:
    """Save what another mesh loads from memory, without any file of a checkpoint. That a mesh loads
    from the disk what is there is a claim of test_meshes."""
    asked = []
    for name, case in cases.items():
        _, _, _, count, mesh = CASES[name]
        config, memory = case.config(case.folder / "nothing", mesh), case.memory(count, 2)
        to = str(case.folder / "from memory" / "checkpoints")
        asked.append({"config": config, "to": to, "attempt": 2, "memory": memory})
    for case, answer in zip(cases.values(), work(folder, count, asked, worker=WORKER), strict=True):
        only(case.folder, answer["step"])


def only(folder: Path, step: int) -> None:
    assert step in (2, 3), "the last copy may not have been complete"
    checkpoint = folder / "before" / "checkpoints" / f"step-{step}"
    shutil.copytree(checkpoint, folder / "disk" / "checkpoints" / checkpoint.name)


@pytest.mark.parametrize("name", CASES)
def test_another_mesh_loads_what_the_disk_has(cases: Mapping[str, Case], name: str) -> None:
    folder = cases[name].folder
    found, expected = (
        tensors_of(folder / source / "checkpoints") for source in ("from memory", "disk")
    )
    assert any(key.endswith("exp_avg_sq") and value.any() for key, value in expected.items())
    assert not differing(found, expected)
