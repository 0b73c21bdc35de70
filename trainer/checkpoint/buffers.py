"""Copies of the state on the host, from which the disk is written while training goes on."""

from collections.abc import Mapping
from typing import Any

import torch

from trainer.checkpoint.memory.slot import placed, shard_of


class HostBuffers:
    """Memory for one copy of the state. It is kept between saves, because the first touch of new
    memory, or pinning it, takes longer than the copy itself."""

    def __init__(self) -> None:
        self._kept: dict[str, torch.Tensor] = {}

    def copy(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """`state` with this rank's parts of all tensors on the host, distributed as they are. It
        stays as it is until the next copy."""
        copied = {name: self._copied(name, value) for name, value in state.items()}
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return copied

    def _copied(self, name: str, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        shard = shard_of(value.detach())
        kept = self._kept.get(name)
        if kept is None:
            cuda = shard.device.type == "cuda"
            kept = torch.empty(shard.shape, dtype=shard.dtype, device="cpu", pin_memory=cuda)
            self._kept[name] = kept
        # From a GPU the copies of all tensors are queued.
        return placed(kept.copy_(shard, non_blocking=True), value)
