"""Plain tensors under tensor parallel, whose ranks also split the tokens of a sequence.

Parameters are DTensors, because FSDP, checkpoints and the gradient norm need their layouts. The
forward pass uses the plain tensors inside them, for two reasons. A DTensor makes each operation
slow to start, and torch.compile fails on DTensors (tests/trainer/parallel/test_dtensor_fault.py).

B: sequences, T: tokens of this cp rank, t: tokens of this tp rank, D: features.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor._dtensor_spec import DTensorSpec

SEQUENCE = 1
"""Dim of hidden states that tensor parallel shards between layers."""
OPS = torch.ops._c10d_functional
"""Collectives that torch.compile can see and `selective` recomputation can store."""


class TensorRanks(NamedTuple):
    """The ranks of axis tp."""

    group: str
    """Name of their process group. A compiled layer can hold a name, but not a group."""
    size: int


def tensor_ranks(parameter: DTensor) -> TensorRanks:
    """The ranks that `parameter`, as the forward pass sees it, is sharded over."""
    mesh = parameter.device_mesh
    return TensorRanks(mesh.get_group().group_name, mesh.size())


def local_weight(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's part of a parameter, for the forward pass.

    A rank uses a replicated parameter for its own tokens or heads only. So its gradient is a
    summand, and the average over data ranks adds the summands first.
    """
    if not isinstance(parameter, DTensor):
        return parameter
    summed = parameter.placements[0].is_replicate()
    if torch.compiler.is_compiling():
        return parameter.to_local(grad_placements=[Partial()] if summed else None)
    part: torch.Tensor = _LocalPart.apply(parameter, summed)
    return part


class _LocalPart(torch.autograd.Function):
    """`to_local` in about half of the time. It is called for each weight of each layer, so a small
    layer would spend most of its time there."""

    @staticmethod
    def forward(ctx: Any, parameter: DTensor, summed: bool) -> torch.Tensor:
        spec, local = parameter._spec, parameter._local_tensor
        if summed:
            spec = DTensorSpec(spec.mesh, (Partial(),), tensor_meta=spec.tensor_meta)
        ctx.spec = spec
        # A new tensor of the same memory, because autograd writes to the object it gets.
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return DTensor(gradient.contiguous(), ctx.spec, requires_grad=False), None


def gather_sequence(part_BtD: torch.Tensor, ranks: TensorRanks) -> torch.Tensor:
    """The tokens of all ranks, [B, T, D]. The gradient of each rank is a summand."""
    whole: torch.Tensor = _Gather.apply(part_BtD, ranks)
    return whole


def scatter_sequence(summand_BTD: torch.Tensor, ranks: TensorRanks) -> torch.Tensor:
    """This rank's tokens of the sum over all ranks, [B, t, D]."""
    part: torch.Tensor = _Scatter.apply(summand_BTD, ranks)
    return part


class Regather:
    """Stored for the backward pass in place of a gathered tensor, and gathers it again there.

    All matrix products of the tensor share one gather, as they did in the forward pass.
    """

    def __init__(self, part_BtD: torch.Tensor, whole_BTD: torch.Tensor, ranks: TensorRanks) -> None:
        self._part_BtD = part_BtD.detach()
        self._storage = whole_BTD.untyped_storage()._cdata
        self._ranks = ranks
        self._stored = self._restored = 0
        self._whole: torch.Tensor | None = None

    def store(self, tensor: torch.Tensor) -> "torch.Tensor | _View":
        """What to store for `tensor`, which an operation needs in the backward pass."""
        # Fake tensors have storages without an address, so their addresses cannot be compared.
        is_whole = tensor.untyped_storage()._cdata == self._storage and tensor.is_contiguous()
        if not is_whole or tensor.numel() != self._part_BtD.numel() * self._ranks.size:
            return tensor
        self._stored += 1
        return _View(self, tensor.shape)

    def restore(self, shape: torch.Size) -> torch.Tensor:
        """The gathered tensor. It is freed when it was restored as often as it was stored. A
        backward pass that is split, as in zero-bubble schedules, restores it twice as often."""
        if self._whole is None:
            with _below_autograd():
                self._whole = _gathered(self._part_BtD, self._ranks)
        whole = self._whole.view(shape)
        self._restored += 1
        if self._restored % self._stored == 0:
            self._whole = None
        return whole


class _View(NamedTuple):
    source: Regather
    shape: torch.Size


def _restore(stored: torch.Tensor | _View) -> torch.Tensor:
    return stored.source.restore(stored.shape) if isinstance(stored, _View) else stored


def gather_again(part_BtD: torch.Tensor, ranks: TensorRanks) -> torch.Tensor:
    """`gather_sequence`. In modules that are called under `stored_as_part`, the result is not kept
    for the backward pass, only this rank's part."""
    whole_BTD = gather_sequence(part_BtD, ranks)
    if torch.is_grad_enabled():
        setattr(whole_BTD, REGATHER, Regather(part_BtD, whole_BTD, ranks))
    return whole_BTD


REGATHER = "_ndctl_regather"
"""Attribute of a result of `gather_again`."""


def stored_as_part(input: torch.Tensor) -> AbstractContextManager[object]:
    """While this is open, operations store `input` as its part, if `gather_again` returned it."""
    if torch.compiler.is_compiling() or (regather := getattr(input, REGATHER, None)) is None:
        return nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(regather.store, _restore)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part_BtD: torch.Tensor, ranks: TensorRanks) -> torch.Tensor:
        ctx.ranks = ranks
        with _below_autograd():
            return _gathered(part_BtD, ranks)

    @staticmethod
    def backward(ctx: Any, gradient_BTD: torch.Tensor) -> tuple[torch.Tensor, None]:
        with _below_autograd():
            return _scattered(gradient_BTD, ctx.ranks), None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, summand_BTD: torch.Tensor, ranks: TensorRanks) -> torch.Tensor:
        ctx.ranks = ranks
        with _below_autograd():
            return _scattered(summand_BTD, ranks)

    @staticmethod
    def backward(ctx: Any, gradient_BtD: torch.Tensor) -> tuple[torch.Tensor, None]:
        with _below_autograd():
            return _gathered(gradient_BtD, ctx.ranks), None


def _below_autograd() -> AbstractContextManager[object]:
    """Without it, each collective would pass through torch's Python code for its gradient, also
    where no gradient is wanted: two thirds of the time to start it. Compiled code does not."""
    if torch.compiler.is_compiling():
        return nullcontext()
    return torch._C._AutoDispatchBelowAutograd()


def _gathered(part_BtD: torch.Tensor, ranks: TensorRanks) -> torch.Tensor:
    stacked = OPS.wait_tensor(
        OPS.all_gather_into_tensor(part_BtD.contiguous(), ranks.size, ranks.group)
    )
    if len(part_BtD) == 1:
        return stacked.view(1, -1, part_BtD.shape[2])
    # Written as torch's own functional collectives do, whose pattern Inductor's asynchronous
    # tensor parallel looks for.
    return torch.cat(stacked.chunk(ranks.size), dim=SEQUENCE)


def _scattered(summand_BTD: torch.Tensor, ranks: TensorRanks) -> torch.Tensor:
    batch, tokens, features = summand_BTD.shape
    if batch == 1:
        stacked = summand_BTD.contiguous().view(ranks.size, tokens // ranks.size, features)
    else:
        stacked = torch.cat(summand_BTD.chunk(ranks.size, dim=SEQUENCE))
    return OPS.wait_tensor(OPS.reduce_scatter_tensor(stacked, "sum", ranks.size, ranks.group))
