"""What one rank of the bundled trainer sends in a step, told by the trainer itself.

The rank is one of a fake process group, whose collectives do nothing; so what it computes means
nothing, but it says all that a rank says.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from orchestrator.contract.env import RankEnv
from orchestrator.contract.training import TrainingConfig
from trainer.building import adapt, choose_passes, outline, parallelise
from trainer.data.batches import MicroBatch
from trainer.main import loss_of, named_to_update, optimizer_of
from trainer.model.fresh import allocate
from trainer.parallel.context import local_positions
from trainer.parallel.tied import find_tied
from trainer.ranks import arrange
from trainer.timing import Stopwatch

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


@contextmanager
def fake_world(size: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def spoken(config: TrainingConfig) -> Counter[str]:
    """Bytes of the whole tensors of a step's collectives on rank 0, by kind."""
    size, length = config.mesh.world_size, config.data.sequence_length
    with fake_world(size):
        ranks = arrange(config.mesh, RankEnv(rank=0, world_size=size))
        stages = outline(config, ranks)
        positions_T = local_positions(length, config.parallel.context, config.mesh.cp, 0)
        for stage in stages:
            adapt(stage, config, ranks)
            parallelise(stage, config, ranks)
            allocate(stage, ranks.device, config.parallel.fsdp.cpu_offload)
            stage.place(positions_T.unsqueeze(0))
        named = named_to_update(stages)
        optimizer = optimizer_of(config, stages, [parameter for _, parameter in named])
        tied = find_tied(stages, ranks.mesh["pp"].get_group())
        passes = choose_passes(stages, config, ranks, loss_of(config, ranks), tied, Stopwatch())
        shape = (config.micro_batch_size, positions_T.numel())
        ids = torch.zeros(shape, dtype=torch.long)
        batches = [MicroBatch(ids, ids) for _ in range(config.gradient_accumulation)]
        ear = Ear()
        with ear:
            passes.train(batches)
            optimizer.step()
    return ear.bytes
