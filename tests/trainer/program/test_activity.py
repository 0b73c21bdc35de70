"""Signs of life of a rank that does no optimizer step, and what it uses."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from trainer.program import devices
from trainer.program.activity import collectives
from trainer.program.devices import readings, use


def test_collectives_of_all_groups_count(tmp_path: Path) -> None:
    store = FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        before = collectives()
        dist.all_reduce(torch.ones(1))
        assert collectives() == before + 1
        other = dist.new_group([0])
        dist.barrier(other)
        assert collectives() > before + 1
    finally:
        dist.destroy_process_group()
    assert collectives() == 0


def test_a_rank_without_torch_has_no_collectives() -> None:
    code = "from trainer.program.activity import collectives; import sys; "
    code += "print(collectives(), 'torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == "0 False\n"


def test_without_a_gpu_the_memory_of_the_process_is_told() -> None:
    before = use()
    assert set(before) == {"peak_memory_bytes"}
    held = bytearray(200 << 20)
    held[::4096] = b"x" * len(held[::4096])
    assert use()["peak_memory_bytes"] >= before["peak_memory_bytes"]
    assert use()["peak_memory_bytes"] > 200 << 20


def test_without_nvidias_driver_the_state_of_a_gpu_is_unknown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(devices, "NVML", "libnvidia-ml-that-is-not-there.so.1")
    devices._nvml.cache_clear()
    assert readings("GPU-0") == {}
    devices._nvml.cache_clear()


class Driver:
    """The calls of NVML, with one GPU. On a machine with a GPU, `readings` calls the driver."""

    def __init__(self, *, knows_power: bool) -> None:
        self.knows_power = knows_power

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, handle: Any) -> int:  # noqa: N802
        return 0 if uuid == b"GPU-1" else 6

    def nvmlDeviceGetUtilizationRates(self, handle: Any, rates: Any) -> int:  # noqa: N802
        rates._obj.gpu, rates._obj.memory = 97, 40
        return 0

    def nvmlDeviceGetTemperature(self, handle: Any, sensor: int, found: Any) -> int:  # noqa: N802
        found._obj.value = 61
        return sensor

    def nvmlDeviceGetPowerUsage(self, handle: Any, found: Any) -> int:  # noqa: N802
        found._obj.value = 645_500
        return 0 if self.knows_power else 3


def test_nvml_tells_utilization_temperature_and_power(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_nvml", lambda: Driver(knows_power=True))
    assert readings("GPU-1") == {
        "gpu_utilization": 0.97,
        "gpu_temperature_c": 61.0,
        "gpu_power_w": 645.5,
    }
    assert readings("GPU-2") == {}
    monkeypatch.setattr(devices, "_nvml", lambda: Driver(knows_power=False))
    assert set(readings("GPU-1")) == {"gpu_utilization", "gpu_temperature_c"}
