"""Memory and utilization of the GPUs that a script uses, for its metrics.

Neither call creates a CUDA context: the script may not have chosen its GPU yet.
"""

import ctypes
import functools
import sys
from pathlib import Path
from typing import Any

NVML = "libnvidia-ml.so.1"


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


def use() -> dict[str, float]:
    """`peak_memory_bytes`: of the GPU's allocator, or of the process if it uses no GPU.
    `gpu_utilization`: 0 to 1, the part of the last second or less in which a kernel ran, of the
    GPU that the process uses most; absent without NVIDIA's driver.
    """
    cuda: Any = sys.modules.get("torch.cuda")
    if cuda is None or not cuda.is_initialized():
        return {"peak_memory_bytes": _peak_of_process()}
    peaks = {one: cuda.max_memory_allocated(one) for one in range(cuda.device_count())}
    device = max(peaks, key=lambda one: peaks[one])
    found = {"peak_memory_bytes": peaks[device]}
    busy = utilization(f"GPU-{cuda.get_device_properties(device).uuid}")
    return found if busy is None else {**found, "gpu_utilization": busy}


def _peak_of_process() -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("VmHWM:")[2].split(maxsplit=1)[0])


def utilization(uuid: str) -> float | None:
    """Of the GPU with this UUID; None if NVML cannot tell."""
    library, handle = _nvml(), ctypes.c_void_p()
    if library is None:
        return None
    if library.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(handle)) != 0:
        return None  # for example a MIG device, whose utilization NVML does not know
    rates = _Utilization()
    if library.nvmlDeviceGetUtilizationRates(handle, ctypes.byref(rates)) != 0:
        return None
    return int(rates.gpu) / 100


@functools.cache
def _nvml() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL(NVML)
    except OSError:  # not installed: an AMD GPU, for example
        return None
    return library if library.nvmlInit_v2() == 0 else None
