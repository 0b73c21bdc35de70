"""Selects the device of a rank."""

from pathlib import Path

import torch

DRIVER = Path("/proc/driver/nvidia/version")
"""Exists while NVIDIA's driver is loaded."""


def device_of(local_rank: int, *, hidden: bool = False) -> torch.device:
    """This rank's GPU; the CPU on a machine without GPUs, or if they are `hidden`.

    Raises:
        RuntimeError: the driver is loaded but torch finds no GPU. torch reports a broken GPU as
            "no GPU"; the rank would then train on its CPU while all others wait for it.
    """
    if torch.cuda.is_available():
        return torch.device("cuda", local_rank)
    if torch.version.cuda is not None and DRIVER.exists() and not hidden:
        raise RuntimeError(
            "No CUDA GPUs are available, but NVIDIA's driver is loaded: `nvidia-smi` shows what is"
            " wrong"
        )
    return torch.device("cpu")
