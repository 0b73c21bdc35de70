"""What the trainer decides itself before it starts."""

from pathlib import Path
from typing import Any

import pytest
import torch

from orchestrator.contract.codec import decode
from orchestrator.contract.files.trainer_config import TrainingConfig
from tests.trainer.launch.tiny_runs import tiny
from trainer.main import run_ahead_of, update_threads_of

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
OFFLOAD: dict[str, Any] = {"parallel": {"fsdp": {"cpu_offload": True}}}


@pytest.mark.parametrize(
    ("changes", "device", "expected"),
    [
        ({}, GPU, 1),
        ({}, CPU, 0),
        ({"optimizer": {"name": "sgd"}}, GPU, 0),
        (OFFLOAD, GPU, 0),
        ({"run_ahead": 3}, CPU, 3),
        ({"run_ahead": 0}, GPU, 0),
    ],
)
def test_steps_run_ahead_where_a_gpu_can_skip_an_update(
    changes: dict[str, Any], device: torch.device, expected: int, tmp_path: Path
) -> None:
    config: TrainingConfig = decode(TrainingConfig, tiny(tmp_path / "out", **dict(changes)))
    assert run_ahead_of(config, device) == expected


def test_offloaded_updates_share_the_processors_of_the_host(tmp_path: Path) -> None:
    plain: TrainingConfig = decode(TrainingConfig, tiny(tmp_path / "out"))
    offloaded: TrainingConfig = decode(TrainingConfig, tiny(tmp_path / "out", **dict(OFFLOAD)))
    assert update_threads_of(plain, 96, 8) == 1
    assert update_threads_of(offloaded, 96, 8) == 12
    assert update_threads_of(offloaded, 2, 8) == 1
