"""What one rank of the bundled trainer allocates in a step, told by the trainer itself.

The rank is one of a fake process group, and its tensors are fake: they have shapes, types and
storages of the right size, and no contents. So a step of any model on any number of ranks runs in
seconds on a laptop, and every allocation of it is seen. It is CPU's code that runs: its attention
kernel, and no streams. What a collective was handed is there until it is waited for, as with NCCL.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.pipelining._utils import InferenceMode
from torch.distributed.pipelining.schedules import _PipelineSchedule
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import (
    is_traceable_wrapper_subclass,
    is_traceable_wrapper_subclass_type,
)

from benchmarks.traced.allocations import Allocations
from orchestrator.contract.files.env import RankEnv
from orchestrator.contract.files.trainer_config import TrainingConfig
from trainer.data.batches import MicroBatch
from trainer.data.documents import documents_at
from trainer.gradients import local_gradients, part_norms, scale, squared_norm
from trainer.main import loss_of, named_to_update, optimizer_of
from trainer.measure.timing import Stopwatch
from trainer.model.decoder import Decoder
from trainer.model.init_weights import allocate
from trainer.model.regions import local_part
from trainer.parallel import zero1
from trainer.parallel.building import (
    change_linears,
    choose_passes,
    parallelise,
    stages_without_storage,
)
from trainer.parallel.context import local_positions
from trainer.parallel.passes import Passes
from trainer.parallel.tied import TiedWeight, find_tied
from trainer.rank.ranks import Ranks, arrange


@dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    parameters: int
    """Bytes of what the rank keeps of them."""
    optimizer: int
    gradients: int
    """As the optimizer finds them."""
    peak: int
    """The most that was there at once in a step."""


def traced(config: TrainingConfig, rank: int) -> Traced:
    """One step of `rank` in a world of fake ranks; every degree of `config` must be a number."""
    with fake_world(config.mesh.world_size, rank):
        ranks = arrange(config.mesh, RankEnv(rank=rank, world_size=config.mesh.world_size))
        # Meshes are made of real numbers, so what makes them comes before the fake ones.
        stages = laid_out(config, ranks)
        with (
            FakeTensorMode(allow_non_fake_inputs=True),
            _Ledger() as ledger,
            _patched(ShardingPropagator, PROPAGATE, _unseen(ledger)),
        ):
            return _step(config, ranks, stages, ledger)


@contextmanager
def _patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


PROPAGATE = "_propagate_tensor_meta_non_cached"
"""How DTensor finds out the shape of a result: with fake tensors as large as those of all ranks."""


def _unseen(ledger: "_Ledger") -> Any:
    real = getattr(ShardingPropagator, PROPAGATE)

    def propagate(self: Any, *args: Any) -> Any:
        with ledger.blind():
            return real(self, *args)

    return propagate


@contextmanager
def fake_world(size: int, rank: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        with ExitStack() as patches:
            patches.enter_context(_patched(_PipelineSchedule, "_warmup_p2p", _agreed))
            for owner, name in ASYNCHRONOUS:
                patches.enter_context(_patched(owner, name, _in_flight(getattr(owner, name))))
            yield
    finally:
        dist.destroy_process_group()


ASYNCHRONOUS = (
    (dist, "all_reduce"),
    (zero1, "reduce_scatter_single"),
    (zero1, "all_gather_single"),
)
"""What the trainer starts and waits for later, with nothing of its own that keeps all tensors."""


def _in_flight(collective: Callable[..., Any]) -> Callable[..., Any]:
    """`collective`, whose work keeps its tensors until it is waited for.

    NCCL's does (`TensorShelf` in torch 2.13's `ProcessGroupNCCL.hpp`), the fake group's does not.
    NCCL lets go of them earlier where its watchdog sees that the device is done; but the host,
    which allocates, is ahead of the device by far.
    """

    def started(*args: Any, **kwargs: Any) -> Any:
        work = collective(*args, **kwargs)
        return work and _Work(work, [leaf for leaf in args if isinstance(leaf, torch.Tensor)])

    return started


@dataclass(slots=True)
class _Work:
    work: dist.Work
    tensors: list[torch.Tensor]

    def wait(self) -> None:
        self.work.wait()
        self.tensors.clear()


def laid_out(config: TrainingConfig, ranks: Ranks) -> list[Decoder]:
    """The rank's part of the model, still without storage."""
    stages = stages_without_storage(config, ranks)
    for stage in stages:
        change_linears(stage, config, ranks)
        parallelise(stage, config, ranks)
    return stages


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """What a rank needs for a step."""

    named: list[tuple[str, torch.nn.Parameter]]
    optimizer: torch.optim.Optimizer
    tied: TiedWeight
    passes: Passes
    batches: list[MicroBatch]


def ready(config: TrainingConfig, ranks: Ranks, stages: list[Decoder]) -> Ready:
    """`stages` with storage, and tokens that are all zeros."""
    coords = config.mesh.coords(ranks.env.rank)
    length, cp = config.data.sequence_length, config.mesh.cp
    positions_T = local_positions(length, config.parallel.context, cp, coords["cp"])
    for stage in stages:
        allocate(stage, ranks.device, config.parallel.fsdp.cpu_offload)
        stage.set_positions(positions_T.unsqueeze(0))
    named = named_to_update(stages)
    watch = Stopwatch()
    optimizer = optimizer_of(config, stages, [parameter for _, parameter in named], watch)
    tied = find_tied(stages, ranks.mesh["pp"].get_group())
    passes = choose_passes(stages, config, ranks, loss_of(config, ranks), tied, watch)
    shape = (config.micro_batch_size, positions_T.numel())
    ids = [torch.zeros(shape, dtype=torch.long) for _ in range(2 * config.gradient_accumulation)]
    documents = None
    if config.data.masks_documents:
        starts_BS = torch.zeros((config.micro_batch_size, length), dtype=torch.long)
        documents = documents_at(starts_BS, positions_T)
    batches = [MicroBatch(*pair, documents) for pair in zip(ids[::2], ids[1::2], strict=True)]
    return Ready(named=named, optimizer=optimizer, tied=tied, passes=passes, batches=batches)


def _step(config: TrainingConfig, ranks: Ranks, stages: list[Decoder], ledger: "_Ledger") -> Traced:
    """As `Stepper.run`, without the numbers that all ranks would agree on."""
    rank = ready(config, ranks, stages)
    optimizer = rank.optimizer
    kept = {"parameters": _bytes(p for stage in stages for p in stage.parameters())}
    kept["optimizer"] = _bytes(
        value for state in optimizer.state.values() for value in state.values() if value.ndim
    )
    rank.passes.train(rank.batches)
    parts = local_gradients((p for _, p in rank.named), ranks.stage_ranks, rank.tied.copies)
    squared_norm(parts, part_norms(parts), ranks.device)
    scale(parts, 0.5)
    kept["gradients"] = sum(part.numel() * part.element_size() for part, _ in parts)
    del parts
    optimizer.step()
    optimizer.zero_grad()
    return Traced(peak=ledger.peak, **kept)


def _bytes(tensors: Iterator[torch.Tensor]) -> int:
    storages = {id(s): s for t in tensors for s in _storages(local_part(t))}
    return sum(storage.nbytes() for storage in storages.values())


def _storages(tensor: torch.Tensor) -> Iterator[torch.UntypedStorage]:
    """Of a tensor that is made of others, as a weight in 4 bits is, those of the others."""
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor.untyped_storage()
        return
    for name in tensor.__tensor_flatten__()[0]:
        yield from _storages(getattr(tensor, name))


def _agreed(_: Any, stages: Sequence[Any], *__: Any) -> None:
    """What pipeline stages agree on with a greeting, whose answer they would read."""
    for stage in stages:
        stage._inference_mode = InferenceMode.STATIC


class _Ledger(Allocations):  # type: ignore[no-untyped-call]
    """Of fake tensors."""

    def __init__(self) -> None:
        super().__init__()
        self._blind = 0

    @contextmanager
    def blind(self) -> Iterator[None]:
        """For tensors that only stand for the shape of others, and are fake in a real run too."""
        self._blind += 1
        try:
            yield
        finally:
            self._blind -= 1

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        plain = not any(map(is_traceable_wrapper_subclass_type, types))
        if plain and func is torch.ops._c10d_functional.wait_tensor.default:
            # The fake one hands on a new tensor, the real one what it waited for.
            return args[0]
        return super().__torch_dispatch__(func, types, args, kwargs)

    def count(self, out: Any) -> None:
        if not self._blind:
            super().count(out)
