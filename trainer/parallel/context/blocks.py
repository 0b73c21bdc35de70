"""Exact attention from blocks: one rank's queries with blocks of keys that arrive one by one.

Legend: B sequences, H heads, T tokens, D features of a head. k and v are one tensor [2, B, H, T,
D].
"""

from dataclasses import dataclass

import torch

from trainer.parallel.context.kernels import AttentionOutput, Block, kernel_for

ALL = slice(None)


@dataclass(frozen=True, slots=True)
class Part:
    """Which queries attend to which keys, as slices of the given tensors."""

    queries: slice
    keys: slice
    causal: bool = False
    """If true, there are as many queries as keys, and no query attends to a later key. If false,
    each query attends to all keys."""

    def block(self, q_BHTD: torch.Tensor, kv_2BHTD: torch.Tensor, scale: float) -> Block:
        k, v = kv_2BHTD[:, :, :, self.keys].unbind()
        return Block(q_BHTD[:, :, self.queries], k, v, scale, self.causal)


OWN = Part(ALL, ALL, causal=True)
"""A rank's queries with its own keys. Both are in the order of the sequence, possibly with gaps."""


class Attention:
    """The output of the queries for all keys that were added so far."""

    def __init__(self, q_BHTD: torch.Tensor, kv_2BHTD: torch.Tensor, scale: float) -> None:
        """Starts with `OWN`, where each query has at least one key."""
        self._q, self._scale = q_BHTD, scale
        first = kernel_for(q_BHTD).forward(OWN.block(q_BHTD, kv_2BHTD, scale))
        self._lse = first.lse_BHT
        # Blocks are merged in the precision of the log-sum-exps.
        self._out = first.out_BHTD.to(self._lse.dtype)

    def add(self, part: Part, kv_2BHTD: torch.Tensor) -> None:
        more = kernel_for(self._q).forward(part.block(self._q, kv_2BHTD, self._scale))
        merge_(self._out[:, :, part.queries], self._lse[:, :, part.queries], more)

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
        self, grad_BHTD: torch.Tensor, q_BHTD: torch.Tensor, whole: AttentionOutput, scale: float
    ) -> None:
        """`whole` is the output of the queries for all their keys."""
        self._grad, self._q, self._whole, self._scale = grad_BHTD, q_BHTD, whole, scale
        self._dq = torch.zeros_like(q_BHTD, dtype=whole.lse_BHT.dtype)

    def backward(self, part: Part, kv_2BHTD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Gradients of the keys and of the values of `part`."""
        rows = part.queries
        whole = AttentionOutput(self._whole.out_BHTD[:, :, rows], self._whole.lse_BHT[:, :, rows])
        block = part.block(self._q, kv_2BHTD, self._scale)
        dq, dk, dv = kernel_for(self._q).backward(block, whole, self._grad[:, :, rows])
        self._dq[:, :, rows] += dq
        return dk, dv

    def zeros_like(self, kv_2BHTD: torch.Tensor) -> torch.Tensor:
        """Zeros to accumulate gradients of keys and values in, in the precision of the sums."""
        return torch.zeros_like(kv_2BHTD, dtype=self._whole.lse_BHT.dtype)

    def of_queries(self) -> torch.Tensor:
        return self._dq.to(self._q.dtype)


def add_(dkv_2BHTD: torch.Tensor, part: Part, gradients: tuple[torch.Tensor, torch.Tensor]) -> None:
    for total, more in zip(dkv_2BHTD, gradients, strict=True):
        total[:, :, part.keys] += more
