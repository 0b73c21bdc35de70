"""Exact attention from blocks: one rank's queries with blocks of keys that arrive one by one.

Legend: B sequences, H heads, T tokens, D features of a head. k and v are one tensor [2, B, H, T,
D].
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch

from trainer.parallel.context.kernels import (
    FLASH,
    AttentionOutput,
    Block,
    Ends,
    Kernel,
    Tensors,
    flash_documents,
    flash_documents_backward,
    kernel_for,
)

ALL = slice(None)


class Part(NamedTuple):
    """Which queries attend to which keys, as slices of the given tensors."""

    queries: slice
    keys: slice
    causal: bool = False
    """If true, there are as many queries as keys, and no query attends to a later key. If false,
    each query attends to all keys."""
    sequences: slice = ALL

    @property
    def rows(self) -> tuple[slice, slice, slice]:
        """Of a tensor [B, H, T, ...] of the queries."""
        return self.sequences, ALL, self.queries

    @property
    def columns(self) -> tuple[slice, slice, slice]:
        """Of a tensor [B, H, T, ...] of the keys."""
        return self.sequences, ALL, self.keys

    def block(self, q_BHTD: torch.Tensor, kv_2BHTD: torch.Tensor, scale: float) -> Block:
        k, v = (x[self.columns] for x in kv_2BHTD.unbind())
        return Block(q_BHTD[self.rows], k, v, scale, self.causal)


OWN = Part(ALL, ALL, causal=True)
"""A rank's queries with its own keys. Both are in the order of the sequence, possibly with gaps."""


class Attention:
    """The output of the queries for all keys that were added so far."""

    def __init__(
        self, q_BHTD: torch.Tensor, kv_2BHTD: torch.Tensor, scale: float, ends: Ends | None
    ) -> None:
        """Starts with `OWN`, where each query has at least one key. `ends`: where documents end
        among the rank's tokens, if no token may attend to another document."""
        self._q, self._scale = q_BHTD, scale
        self._kernel = kernel_for(q_BHTD, documents=ends is not None)
        first = forward_own(self._kernel, OWN.block(q_BHTD, kv_2BHTD, scale), ends)
        self._lse = first.lse_BHT
        # Blocks are merged in the precision of the log-sum-exps.
        self._out = first.out_BHTD.to(self._lse.dtype)

    def add(self, part: Part, kv_2BHTD: torch.Tensor) -> None:
        more = self._kernel.forward(part.block(self._q, kv_2BHTD, self._scale))
        merge_(self._out[part.rows], self._lse[part.rows], more)

    def output(self) -> AttentionOutput:
        # In memory the heads of a token are adjacent, as the next layer needs them.
        out_BTHD = self._out.to(self._q.dtype).transpose(1, 2).contiguous()
        return AttentionOutput(out_BTHD.transpose(1, 2), self._lse.contiguous())


def merge_(out_BHTD: torch.Tensor, lse_BHT: torch.Tensor, more: AttentionOutput) -> None:
    """Merge `more`, the output for further keys, in place.

    An output is a mean of values with weights exp(score), and its log-sum-exp is the logarithm of
    the sum of these weights. So two outputs are averaged with the exponentials of their
    log-sum-exps as weights.
    """
    share = torch.sigmoid(more.lse_BHT - lse_BHT).unsqueeze(-1)
    out_BHTD.lerp_(more.out_BHTD.to(out_BHTD.dtype), share)
    lse_BHT.copy_(torch.logaddexp(lse_BHT, more.lse_BHT))


class Gradients:
    """Accumulates the gradient of the queries. The caller accumulates those of keys and values."""

    def __init__(
        self,
        grad_BHTD: torch.Tensor,
        q_BHTD: torch.Tensor,
        whole: AttentionOutput,
        scale: float,
        ends: Ends | None,
    ) -> None:
        """`whole` is the output of the queries for all their keys. `ends` as in `Attention`."""
        self._grad, self._q, self._whole, self._scale = grad_BHTD, q_BHTD, whole, scale
        self._ends = ends
        self._kernel = kernel_for(q_BHTD, documents=ends is not None)
        self._dq = torch.zeros_like(q_BHTD, dtype=whole.lse_BHT.dtype)

    def backward(self, part: Part, kv_2BHTD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Gradients of the keys and of the values of `part`."""
        rows = part.rows
        whole = AttentionOutput(self._whole.out_BHTD[rows], self._whole.lse_BHT[rows])
        block = part.block(self._q, kv_2BHTD, self._scale)
        ends = self._ends if part is OWN else None
        dq, dk, dv = backward_own(self._kernel, block, whole, self._grad[rows], ends)
        self._dq[rows] += dq
        return dk, dv

    def zeros_like(self, kv_2BHTD: torch.Tensor) -> torch.Tensor:
        """Zeros to accumulate gradients of keys and values in, in the precision of the sums."""
        return torch.zeros_like(kv_2BHTD, dtype=self._whole.lse_BHT.dtype)

    def of_queries(self) -> torch.Tensor:
        return self._dq.to(self._q.dtype)


def add_(dkv_2BHTD: torch.Tensor, part: Part, gradients: tuple[torch.Tensor, torch.Tensor]) -> None:
    for total, more in zip(dkv_2BHTD, gradients, strict=True):
        total[part.columns] += more


def forward_own(kernel: Kernel, block: Block, ends: Ends | None) -> AttentionOutput:
    """The output of a block in which each query attends to its own document only, if `ends` are
    given: where documents end, per sequence."""
    if ends is None:
        return kernel.forward(block)
    if kernel is FLASH:
        return flash_documents(block, ends)
    q_BHTD = block.q_BHTD
    # In memory the heads of a token are adjacent, as the next layer needs them.
    out_BHTD = q_BHTD.new_empty(q_BHTD.transpose(1, 2).shape).transpose(1, 2)
    precision = torch.promote_types(q_BHTD.dtype, torch.float32)
    lse_BHT = q_BHTD.new_empty(q_BHTD.shape[:3], dtype=precision)
    for rows in _documents(ends):
        one = kernel.forward(_only(block, rows))
        out_BHTD[rows], lse_BHT[rows] = one.out_BHTD, one.lse_BHT
    return AttentionOutput(out_BHTD, lse_BHT)


def backward_own(
    kernel: Kernel, block: Block, whole: AttentionOutput, grad_BHTD: torch.Tensor, ends: Ends | None
) -> Tensors:
    """Gradients of q, k and v. `whole` is the output for all keys, also those of other blocks."""
    if ends is None:
        return kernel.backward(block, whole, grad_BHTD)
    if kernel is FLASH:
        return flash_documents_backward(block, whole, grad_BHTD, ends)
    found = tuple(torch.empty_like(x) for x in (block.q_BHTD, block.k_BHTD, block.v_BHTD))
    for rows in _documents(ends):
        output = AttentionOutput(whole.out_BHTD[rows], whole.lse_BHT[rows])
        parts = kernel.backward(_only(block, rows), output, grad_BHTD[rows])
        for gradient, part in zip(found, parts, strict=True):
            gradient[rows] = part
    return found[0], found[1], found[2]


def _documents(ends: Ends) -> Iterator[tuple[slice, slice, slice]]:
    """The tokens of each document, in a tensor [B, H, T, ...]."""
    for sequence, stops in enumerate(ends):
        for first, stop in pairwise((0, *stops)):
            yield slice(sequence, sequence + 1), ALL, slice(first, stop)


def _only(block: Block, rows: tuple[slice, slice, slice]) -> Block:
    q, k, v = (x[rows] for x in (block.q_BHTD, block.k_BHTD, block.v_BHTD))
    return Block(q, k, v, block.scale, block.causal)
