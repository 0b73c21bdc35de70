"""Memory, utilization, temperature and power of the GPUs that a process uses, for its metrics.

No call creates a CUDA context: the script may not have chosen its GPU yet.
"""

import ctypes
import functools
import sys
from pathlib import Path
from typing import Any

NVML = "libnvidia-ml.so.1"
OF_THE_CHIP = 0
"""NVML_TEMPERATURE_GPU"""


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


def use() -> dict[str, float]:
    """`peak_memory_bytes`: of the GPU's allocator, or of the process if it uses no GPU.
    `gpu_utilization`: 0 to 1, the part of the last second or less in which a kernel ran, of the
    GPU that the process uses most; `gpu_temperature_c` and `gpu_power_w` of the same GPU. Each is
    absent if NVIDIA's driver cannot tell.
    """
    cuda: Any = sys.modules.get("torch.cuda")
    if cuda is None or not cuda.is_initialized():
        return {"peak_memory_bytes": _peak_of_process()}
    peaks = {one: cuda.max_memory_allocated(one) for one in range(cuda.device_count())}
    device = max(peaks, key=lambda one: peaks[one])
    return {"peak_memory_bytes": peaks[device], **state_of(cuda, device)}


def state_of(cuda: Any, device: int) -> dict[str, float]:
    """`cuda`: torch.cuda, initialized."""
    return readings(f"GPU-{cuda.get_device_properties(device).uuid}")


def _peak_of_process() -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("VmHWM:")[2].split(maxsplit=1)[0])


def readings(uuid: str) -> dict[str, float]:
    """What NVML can tell of the GPU with this UUID."""
    library, handle = _nvml(), ctypes.c_void_p()
    if library is None:
        return {}
    if library.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(handle)) != 0:
        return {}  # for example a MIG device, which has no such figures of its own
    found: dict[str, float] = {}
    rates, number = _Utilization(), ctypes.c_uint()
    if library.nvmlDeviceGetUtilizationRates(handle, ctypes.byref(rates)) == 0:
        found["gpu_utilization"] = int(rates.gpu) / 100
    if library.nvmlDeviceGetTemperature(handle, OF_THE_CHIP, ctypes.byref(number)) == 0:
        found["gpu_temperature_c"] = float(number.value)
    if library.nvmlDeviceGetPowerUsage(handle, ctypes.byref(number)) == 0:
        found["gpu_power_w"] = number.value / 1000
    return found


@functools.cache
def _nvml() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL(NVML)
    except OSError:  # not installed: an AMD GPU, for example
        return None
    return library if library.nvmlInit_v2() == 0 else None
