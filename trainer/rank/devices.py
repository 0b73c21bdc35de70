"""Selects the device of a rank."""

import torch

from trainer.rank import environment


def device_of(local_rank: int, *, hidden: bool = False) -> torch.device:
    """This rank's GPU; the CPU on a machine without GPUs, or if they are `hidden`.

    Raises:
        RuntimeError: the driver is loaded but torch finds no GPU. torch reports a broken GPU as
            "no GPU"; the rank would then train on its CPU while all others wait for it.
    """
    if torch.cuda.is_available():
        return torch.device("cuda", local_rank)
    if torch.version.cuda is not None and environment.DRIVER.exists() and not hidden:
        raise RuntimeError(
            "No CUDA GPUs are available, but NVIDIA's driver is loaded: `nvidia-smi` shows what is"
            " wrong"
        )
    return torch.device("cpu")


def has_fast_bfloat16(device: torch.device) -> bool:
    """Whether `device` is a GPU with bfloat16 units (NVIDIA's from Ampere on)."""
    return device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)


def name_of(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
