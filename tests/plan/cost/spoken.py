"""What one rank of the bundled trainer sends in a step, told by the trainer itself.

The rank is one of a fake process group, whose collectives do nothing; so what it computes means
nothing, but it says all that a rank says.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.traced import fake_world, laid_out, ready
from orchestrator.contract.env import RankEnv
from orchestrator.contract.training import TrainingConfig
from trainer.ranks import arrange

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
SMALL = 4096
"""Bytes below which a collective is of single values, as a norm's gradient or a loss is."""


class Ear(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up what is handed to collectives: of a gather the result, else the input."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        space, name = func._schema.name.split("::")
        if space in ("c10d", "_c10d_functional"):
            assert name in KINDS or name in SILENT, name
            size = max(
                (
                    leaf.numel() * leaf.element_size()
                    for leaf in tree_leaves((args, out))
                    if isinstance(leaf, torch.Tensor)
                ),
                default=0,
            )
            if name in KINDS and size >= SMALL:
                self.bytes[KINDS[name]] += size
        return out


def spoken(config: TrainingConfig) -> Counter[str]:
    """Bytes of the whole tensors of a step's collectives on rank 0, by kind."""
    size = config.mesh.world_size
    with fake_world(size, 0):
        ranks = arrange(config.mesh, RankEnv(rank=0, world_size=size))
        rank = ready(config, ranks, laid_out(config, ranks))
        ear = Ear()
        with ear:
            rank.passes.train(rank.batches)
            rank.optimizer.step()
    return ear.bytes
