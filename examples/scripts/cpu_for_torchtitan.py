"""Lets torchtitan 0.3 run on a machine without a GPU. Import it before torchtitan's Trainer.

torchtitan knows no CPU. It asks its device for a name and for memory, which `torch.cpu` does not
have. And it is written for torch's nightly builds.
"""

import sys
import types
from typing import Any

import torch
from torchtitan.tools import utils


class Cpu(types.ModuleType):
    """`torch.cpu` with what torchtitan asks of a device."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def current_device(self) -> int:
        return 0

    def get_device_name(self, device: object) -> str:
        return "cpu"

    def get_device_properties(self, device: object) -> Any:
        return types.SimpleNamespace(total_memory=1 << 30)

    def memory_stats(self, device: object) -> dict[str, int]:
        return {}

    def reset_peak_memory_stats(self) -> None:
        """There are no statistics."""

    def empty_cache(self) -> None:
        """There is no cache."""


if not torch.cuda.is_available():
    # ndctl imports modules before the script if an earlier attempt has imported them.
    early = [one for name, one in sys.modules.items() if name.startswith("torchtitan.")]
    for module in (utils, *early):
        if hasattr(module, "device_type"):
            module.device_type = "cpu"
        if hasattr(module, "device_module"):
            module.device_module = Cpu("cpu")
if not hasattr(torch.distributed, "set_timeout"):
    torch.distributed.set_timeout = torch.distributed.distributed_c10d._set_pg_timeout
