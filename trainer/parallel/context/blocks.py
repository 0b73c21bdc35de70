"""Attention put together from blocks, exactly: the queries of one rank, and keys as they come.

Legend: B sequences, H heads, T tokens, D features of a head; k and v travel as one tensor
[2, B, H, T, D].
"""

from dataclasses import dataclass

import torch

from trainer.parallel.context.kernels import Answer, Block, kernel_for

ALL = slice(None)


@dataclass(frozen=True, slots=True)
class Part:
    """Which queries see which keys, both told by their places in the tensors at hand."""

    queries: slice
    keys: slice
    causal: bool = False
    """As many queries as keys, and none sees a later key; else each sees all of them."""

    def block(self, q_BHTD: torch.Tensor, kv_2BHTD: torch.Tensor, scale: float) -> Block:
        k, v = kv_2BHTD[:, :, :, self.keys].unbind()
        return Block(q_BHTD[:, :, self.queries], k, v, scale, self.causal)


OWN = Part(ALL, ALL, causal=True)
"""A rank's tokens among themselves: they lie in the order of the sequence, with or without gaps."""


class Attention:
    """What the queries have made of the keys seen so far."""

    def __init__(self, q_BHTD: torch.Tensor, kv_2BHTD: torch.Tensor, scale: float) -> None:
        """Begins with `OWN`, in which every query sees something."""
        self._q, self._scale = q_BHTD, scale
        answer = kernel_for(q_BHTD).forward(OWN.block(q_BHTD, kv_2BHTD, scale))
        self._lse = answer.lse_BHT
        # Blocks are added up in the precision of the log-sum-exps.
        self._out = answer.out_BHTD.to(self._lse.dtype)

    def see(self, part: Part, kv_2BHTD: torch.Tensor) -> None:
        more = kernel_for(self._q).forward(part.block(self._q, kv_2BHTD, self._scale))
        merge_(self._out[:, :, part.queries], self._lse[:, :, part.queries], more)

    def answer(self) -> Answer:
        # In memory the heads of a token lie side by side, as the model wants them next.
        out_BTHD = self._out.to(self._q.dtype).transpose(1, 2).contiguous()
        return Answer(out_BTHD.transpose(1, 2), self._lse.contiguous())


def merge_(out_BHTD: torch.Tensor, lse_BHT: torch.Tensor, more: Answer) -> None:
    """Let an answer count further keys, those of `more`, in place.

    An answer is a mean of values weighted by exp(score), and its log-sum-exp is the logarithm of
    the sum of the weights; so two answers are averaged by the exponentials of theirs.
    """
    share = torch.sigmoid(more.lse_BHT - lse_BHT).unsqueeze(-1)
    out_BHTD.lerp_(more.out_BHTD.to(out_BHTD.dtype), share)
    lse_BHT.copy_(torch.logaddexp(lse_BHT, more.lse_BHT))


class Gradients:
    """Those of the queries are added up here, those of keys and values where the caller says."""

    def __init__(
        self, grad_BHTD: torch.Tensor, q_BHTD: torch.Tensor, whole: Answer, scale: float
    ) -> None:
        """`whole`: what the queries made of all that they see."""
        self._grad, self._q, self._whole, self._scale = grad_BHTD, q_BHTD, whole, scale
        self._dq = torch.zeros_like(q_BHTD, dtype=whole.lse_BHT.dtype)

    def see(self, part: Part, kv_2BHTD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of the keys and values of `part`."""
        rows = part.queries
        whole = Answer(self._whole.out_BHTD[:, :, rows], self._whole.lse_BHT[:, :, rows])
        block = part.block(self._q, kv_2BHTD, self._scale)
        dq, dk, dv = kernel_for(self._q).backward(block, whole, self._grad[:, :, rows])
        self._dq[:, :, rows] += dq
        return dk, dv

    def no_keys(self, kv_2BHTD: torch.Tensor) -> torch.Tensor:
        """Zeros to add gradients of keys and values to."""
        return torch.zeros_like(kv_2BHTD, dtype=self._whole.lse_BHT.dtype)

    def of_queries(self) -> torch.Tensor:
        return self._dq.to(self._q.dtype)


def add_(dkv_2BHTD: torch.Tensor, part: Part, gradients: tuple[torch.Tensor, torch.Tensor]) -> None:
    for total, more in zip(dkv_2BHTD, gradients, strict=True):
        total[:, :, part.keys] += more
