"""Torch's fused attention kernels, called directly.

Merging blocks of attention needs the log-sum-exp of each query's scores, which
`scaled_dot_product_attention` does not return. Nothing here is differentiable: the caller of a
forward kernel must also call the backward kernel.

Legend: B sequences, H heads (k and v may have fewer, each for a group of query heads), T tokens,
D features of a head.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import torch
from torch.nn.functional import pad

aten = torch.ops.aten

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Ends = tuple[tuple[int, ...], ...]
"""For each sequence of a batch, where each document ends among the tokens of a tensor. The last
one ends with the tensor."""

LONGEST_FLASH_HEAD = 256
LONGEST_CUDNN_HEAD = 128
"""Its backward pass supports longer heads only on some devices."""
CUDNN_TOO_OLD = 91_501
LSE_ALIGNMENT = 32
"""The efficient kernel stores the log-sum-exps of this many queries at a time."""


@dataclass(frozen=True, slots=True)
class Block:
    """Some queries and keys. If `causal`, there are equally many, and query n sees keys 0 to n."""

    q_BHTD: torch.Tensor
    k_BHTD: torch.Tensor
    v_BHTD: torch.Tensor
    scale: float
    causal: bool


@dataclass(frozen=True, slots=True)
class AttentionOutput:
    """Output of queries for the keys of one block or, in backward kernels, for all their keys."""

    out_BHTD: torch.Tensor
    lse_BHT: torch.Tensor
    """Log-sum-exp of the scores, at least float32."""


@dataclass(frozen=True, slots=True)
class Kernel:
    forward: Callable[[Block], AttentionOutput]
    backward: Callable[[Block, AttentionOutput, torch.Tensor], Tensors]
    """Takes the block, the output for all keys, and its gradient; returns those of q, k and v."""


def kernel_for(q_BHTD: torch.Tensor, *, documents: bool = False) -> Kernel:
    """The kernel that `scaled_dot_product_attention` would take. It is the same for all blocks of a
    query, and for forward and backward, because the log-sum-exp of one is the input of another.

    For `documents` it is never cuDNN's: FlashAttention computes all documents in one call.
    """
    if q_BHTD.device.type == "cpu":
        return CPU
    cudnn = not documents and _cudnn_is_first(q_BHTD.device)
    return cuda_kernel(q_BHTD.dtype, q_BHTD.shape[-1], cudnn=cudnn)


def cuda_kernel(dtype: torch.dtype, head: int, *, cudnn: bool) -> Kernel:
    """
    Args:
        head: features of a head, a multiple of 8.
        cudnn: torch tries cuDNN first on the device.
    """
    if dtype not in (torch.bfloat16, torch.float16):
        return EFFICIENT
    if cudnn and head <= LONGEST_CUDNN_HEAD:
        return CUDNN
    return FLASH if head <= LONGEST_FLASH_HEAD else EFFICIENT


@cache
def _cudnn_is_first(device: torch.device) -> bool:
    if not torch.cuda.is_available() or not torch.backends.cuda.cudnn_sdp_enabled():
        return False
    capability = torch.cuda.get_device_capability(device)
    return prefers_cudnn(capability, torch.backends.cudnn.version() or 0)


def prefers_cudnn(capability: tuple[int, int], version: int) -> bool:
    """The rule of torch 2.13 (`check_prefer_cudnn_attention`): Hopper and Blackwell of data
    centers, with a cuDNN newer than 9.15.1. Elsewhere flash attention is as fast."""
    return capability in ((9, 0), (10, 0)) and version > CUDNN_TOO_OLD


def _cpu_forward(block: Block) -> AttentionOutput:
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
        block.q_BHTD, block.k_BHTD, block.v_BHTD, 0.0, block.causal, scale=block.scale
    )
    return AttentionOutput(out, lse)


def _cpu_backward(block: Block, whole: AttentionOutput, grad_BHTD: torch.Tensor) -> Tensors:
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad_BHTD,
        block.q_BHTD,
        block.k_BHTD,
        block.v_BHTD,
        whole.out_BHTD,
        whole.lse_BHT,
        0.0,
        block.causal,
        scale=block.scale,
    )


def _flash_forward(block: Block) -> AttentionOutput:
    out, lse, *_ = aten._scaled_dot_product_flash_attention(
        block.q_BHTD, block.k_BHTD, block.v_BHTD, 0.0, block.causal, False, scale=block.scale
    )
    return AttentionOutput(out, lse)


def _flash_backward(block: Block, whole: AttentionOutput, grad_BHTD: torch.Tensor) -> Tensors:
    q, k = block.q_BHTD, block.k_BHTD
    return aten._scaled_dot_product_flash_attention_backward(
        grad_BHTD,
        q,
        k,
        block.v_BHTD,
        whole.out_BHTD,
        whole.lse_BHT.contiguous(),  # the kernel ignores strides
        None,  # no sequences of different lengths
        None,
        q.shape[2],
        k.shape[2],
        0.0,
        block.causal,
        *_no_dropout(q, torch.uint64, 2),
        scale=block.scale,
    )


def flash_documents(block: Block, ends: Ends) -> AttentionOutput:
    """FlashAttention of each document on its own, in one kernel. q, k and v have the same tokens.

    No GPU has run it yet: tests check its arguments and shapes, and where there is a GPU its
    values.
    """
    q, k, v = (_in_a_row(x) for x in (block.q_BHTD, block.k_BHTD, block.v_BHTD))
    bounds, longest = _bounds(block, ends)
    out_NHD, lse_HN, *_ = aten._flash_attention_forward(
        q, k, v, bounds, bounds, longest, longest, 0.0, block.causal, False, scale=block.scale
    )
    batch = block.q_BHTD.shape[0]
    lse_BHT = lse_HN.view(len(lse_HN), batch, -1).transpose(0, 1)
    return AttentionOutput(
        _in_sequences(out_NHD, batch), lse_BHT.clone(memory_format=torch.contiguous_format)
    )


def flash_documents_backward(
    block: Block, whole: AttentionOutput, grad_BHTD: torch.Tensor, ends: Ends
) -> Tensors:
    q, k, v = (_in_a_row(x) for x in (block.q_BHTD, block.k_BHTD, block.v_BHTD))
    bounds, longest = _bounds(block, ends)
    gradients = aten._flash_attention_backward(
        _in_a_row(grad_BHTD),
        q,
        k,
        v,
        _in_a_row(whole.out_BHTD),
        whole.lse_BHT.transpose(0, 1).flatten(1).contiguous(),
        bounds,
        bounds,
        longest,
        longest,
        0.0,
        block.causal,
        *_no_dropout(q, torch.uint64, 2),
        scale=block.scale,
    )
    dq, dk, dv = (_in_sequences(x, block.q_BHTD.shape[0]) for x in gradients)
    return dq, dk, dv


def _in_a_row(x_BHTD: torch.Tensor) -> torch.Tensor:
    """The tokens of all sequences, [B * T, H, D]. A view, if heads of a token are adjacent."""
    return x_BHTD.transpose(1, 2).flatten(0, 1)


def _in_sequences(x_NHD: torch.Tensor, batch: int) -> torch.Tensor:
    return x_NHD.view(batch, -1, *x_NHD.shape[1:]).transpose(1, 2)


def _bounds(block: Block, ends: Ends) -> tuple[torch.Tensor, int]:
    """The ends of all documents in a row, from 0 on, and the tokens of the longest one."""
    tokens = block.q_BHTD.shape[2]
    bounds = [0, *(at * tokens + end for at, stops in enumerate(ends) for end in stops)]
    longest = max(stop - first for first, stop in pairwise(bounds))
    on_host = torch.tensor(bounds, dtype=torch.int32)
    # The host does not wait for so small a copy.
    return on_host.to(block.q_BHTD.device, non_blocking=True), longest


def _cudnn_forward(block: Block) -> AttentionOutput:
    out, lse, *_ = aten._scaled_dot_product_cudnn_attention(
        block.q_BHTD,
        block.k_BHTD,
        block.v_BHTD,
        None,
        True,
        0.0,
        block.causal,
        False,
        scale=block.scale,
    )
    return AttentionOutput(out, lse.squeeze(-1))  # this kernel's has a dimension more


def _cudnn_backward(block: Block, whole: AttentionOutput, grad_BHTD: torch.Tensor) -> Tensors:
    q, k = block.q_BHTD, block.k_BHTD
    return aten._scaled_dot_product_cudnn_attention_backward(
        grad_BHTD,
        q,
        k,
        block.v_BHTD,
        whole.out_BHTD,
        whole.lse_BHT.contiguous().unsqueeze(-1),
        *_no_dropout(q, torch.int64),
        None,  # no mask
        None,  # no sequences of different lengths
        None,
        q.shape[2],
        k.shape[2],
        0.0,
        block.causal,
        scale=block.scale,
    )


def _efficient_forward(block: Block) -> AttentionOutput:
    k, v = repeated(block)
    out, lse, *_ = aten._scaled_dot_product_efficient_attention(
        block.q_BHTD, k, v, None, True, 0.0, block.causal, scale=block.scale
    )
    return AttentionOutput(out, lse.narrow(2, 0, block.q_BHTD.shape[2]))


def _efficient_backward(block: Block, whole: AttentionOutput, grad_BHTD: torch.Tensor) -> Tensors:
    k, v = repeated(block)
    missing = -whole.lse_BHT.shape[2] % LSE_ALIGNMENT
    dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
        grad_BHTD,
        block.q_BHTD,
        k,
        v,
        None,
        whole.out_BHTD,
        # The forward kernel writes infinity for padding queries, which gives them weight zero.
        pad(whole.lse_BHT, (0, missing), value=torch.inf),
        *_no_dropout(k, torch.int64),
        0.0,
        [True, True, True, False],
        block.causal,
        scale=block.scale,
    )
    return dq, summed(dk, block.k_BHTD), summed(dv, block.v_BHTD)


def repeated(block: Block) -> tuple[torch.Tensor, torch.Tensor]:
    """k and v with one head per query head, because this kernel does not support grouped heads."""
    group = block.q_BHTD.shape[1] // block.k_BHTD.shape[1]
    if group == 1:
        return block.k_BHTD, block.v_BHTD
    return block.k_BHTD.repeat_interleave(group, 1), block.v_BHTD.repeat_interleave(group, 1)


def summed(grad_BHTD: torch.Tensor, like_BHTD: torch.Tensor) -> torch.Tensor:
    """The gradient of kv heads, summed over their repetitions."""
    return grad_BHTD.unflatten(1, (like_BHTD.shape[1], -1)).sum(2)


def _no_dropout(like: torch.Tensor, dtype: torch.dtype, *shape: int) -> tuple[torch.Tensor, ...]:
    """Seed and offset of the random numbers for dropout, which is zero."""
    seed = torch.zeros(shape, dtype=dtype, device=like.device)
    return seed, torch.zeros((), dtype=dtype, device=like.device)


CPU = Kernel(_cpu_forward, _cpu_backward)
FLASH = Kernel(_flash_forward, _flash_backward)
"""For bfloat16 and float16 on CUDA."""
CUDNN = Kernel(_cudnn_forward, _cudnn_backward)
"""For bfloat16 and float16 where torch prefers it. No GPU has run it yet: tests check its
arguments and shapes, and where there is a GPU its values."""
EFFICIENT = Kernel(_efficient_forward, _efficient_backward)
"""For all other cases on CUDA: it supports float32 and heads of any size."""
