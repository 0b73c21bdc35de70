"""The device that a rank computes on."""

from pathlib import Path

import torch

DRIVER = Path("/proc/driver/nvidia/version")
"""There while NVIDIA's driver is loaded."""


def device_of(local_rank: int, *, hidden: bool = False) -> torch.device:
    """This rank's GPU; the CPU on a machine without GPUs, or where they are `hidden`.

    Raises RuntimeError where there should be one: torch takes a GPU that broke for none, and a rank
    that went on without would compute on its processor while all others wait for it.
    """
    if torch.cuda.is_available():
        return torch.device("cuda", local_rank)
    if torch.version.cuda is not None and DRIVER.exists() and not hidden:
        raise RuntimeError(
            "No CUDA GPUs are available, and NVIDIA's driver is loaded: `nvidia-smi` tells what is"
            " wrong with them"
        )
    return torch.device("cpu")
