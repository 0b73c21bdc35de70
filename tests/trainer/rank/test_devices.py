"""The device of a rank, and errors of a machine whose GPU failed."""

from pathlib import Path

import pytest
import torch

from orchestrator.contract.files.env import RankEnv
from orchestrator.diagnosis.classes import FailureSigns, classify
from trainer.rank import environment
from trainer.rank.devices import device_of


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine with NVIDIA's driver on which torch finds no GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(environment, "DRIVER", tmp_path / "version")
    environment.DRIVER.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.126.09\n")
    return environment.DRIVER


@pytest.mark.usefixtures("broken")
def test_a_machine_with_a_failed_gpu_is_not_taken_for_one_without_gpus() -> None:
    with pytest.raises(RuntimeError, match="NVIDIA's driver is loaded") as raised:
        device_of(1)
    found = classify(FailureSigns(lines=(f"RuntimeError: {raised.value}",)))
    assert found is not None
    assert (found.rule.name, found.rule.scope) == ("gpu-not-visible", "host")


def test_a_machine_without_gpus_computes_on_its_cpu(broken: Path) -> None:
    broken.unlink()
    assert device_of(1) == torch.device("cpu")


@pytest.mark.usefixtures("broken")
def test_no_error_is_raised_if_gpus_are_hidden_on_purpose() -> None:
    env = RankEnv.from_mapping({"CUDA_VISIBLE_DEVICES": "", "LOCAL_RANK": "1"})
    assert device_of(env.local_rank, hidden=env.no_gpu) == torch.device("cpu")
    assert not RankEnv.from_mapping({"CUDA_VISIBLE_DEVICES": "0,1"}).no_gpu
    assert not RankEnv.from_mapping({}).no_gpu


def test_a_rank_uses_the_gpu_of_its_local_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert device_of(3) == torch.device("cuda", 3)
