"""Traffic of one rank of the trainer in a step, measured in the trainer itself.

The rank is in a fake process group, whose collectives do nothing. Its results are meaningless, but
it calls every collective that a real rank calls.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _resolve_process_group
from torch._library.custom_ops import OPDEFS
from torch.distributed.distributed_c10d import GroupName
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.traced.step import fake_world, laid_out, ready
from orchestrator.contract.files.env import RankEnv
from orchestrator.contract.files.trainer_config import TrainingConfig
from orchestrator.contract.mesh import AXES, Mesh
from orchestrator.plan.cost.collectives import (
    exchange_bytes,
    ring_all_reduce_bytes,
    ring_gather_bytes,
)
from trainer.rank.ranks import arrange

KINDS = {
    "_allgather_base_": "all-gather",
    "allgather_into_tensor_coalesced_": "all-gather",
    "all_gather_into_tensor": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "reduce_scatter_tensor": "reduce-scatter",
    "allreduce_": "all-reduce",
    "all_reduce": "all-reduce",
    "all_reduce_": "all-reduce",
    "all_to_all_single": "all-to-all",
    "send": "send",
}
SILENT = {"wait_tensor", "_wrap_tensor_autograd", "recv_", "barrier"}
SENT: dict[str, Callable[[int, int], float]] = {
    "all-gather": ring_gather_bytes,
    "reduce-scatter": ring_gather_bytes,
    "all-reduce": ring_all_reduce_bytes,
    "all-to-all": exchange_bytes,
    "send": lambda _, size: size,
}
"""Kind -> bytes that a rank sends, as a function of the group size and the bytes of the largest
tensor of the call, which is the result of a gather or the input of other collectives."""
SMALL = 4096
"""Smaller collectives have only single values, for example a loss or the gradient of a norm."""

TrafficByAxis = Counter[tuple[str, str]]
"""(axis, collective) -> bytes, or number of calls."""


class TrafficCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the bytes that collectives get, including those of context parallel."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._mesh = mesh
        self.bytes: TrafficByAxis = Counter()
        self.calls: TrafficByAxis = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        space, name = func._schema.name.split("::")
        if space == "ndctl":
            # An operator's own collectives are not counted, because torch disables modes inside it.
            with self:
                return OPDEFS[func._schema.name]._init_fn(*args, **(kwargs or {}))
        out = func(*args, **(kwargs or {}))
        if space in ("c10d", "_c10d_functional"):
            assert name in KINDS or name in SILENT, name
            sizes = [
                leaf.numel() * leaf.element_size()
                for leaf in tree_leaves((args, out))
                if isinstance(leaf, torch.Tensor)
            ]
            if name in KINDS and max(sizes) >= SMALL:
                self._count(KINDS[name], dist.get_process_group_ranks(_group(args)), max(sizes))
        return out

    def _count(self, kind: str, ranks: list[int], size: int) -> None:
        places = [self._mesh.coords(rank) for rank in ranks]
        axes = [axis for axis in AXES if len({place[axis] for place in places}) > 1]
        row = " x ".join(axes), kind
        self.bytes[row] += SENT[kind](len(ranks), size)  # type: ignore[assignment]
        self.calls[row] += 1


def _group(args: Sequence[Any]) -> dist.ProcessGroup:
    """The group of a collective: an object, or a name as the last argument."""
    for arg in args:
        if isinstance(arg, torch.ScriptObject):
            return dist.ProcessGroup.unbox(arg)
    name = [arg for arg in args if isinstance(arg, str)][-1]
    return _resolve_process_group(GroupName(name))


def traffic_of_rank(config: TrainingConfig, rank: int = 0) -> TrafficCounter:
    """Traffic of `rank` in a step."""
    with fake_world(config.mesh.world_size, rank):
        ranks = arrange(config.mesh, RankEnv(rank=rank, world_size=config.mesh.world_size))
        it = ready(config, ranks, laid_out(config, ranks))
        counter = TrafficCounter(config.mesh)
        with counter:
            it.passes.train(it.batches)
            it.optimizer.step()
    return counter
