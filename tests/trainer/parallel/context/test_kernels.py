"""Which kernel computes a block of attention, and the arguments of torch's CUDA kernels."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from trainer.parallel.context.blocks import backward_own, forward_own, merge_
from trainer.parallel.context.kernels import (
    CPU,
    CUDNN,
    EFFICIENT,
    FLASH,
    AttentionOutput,
    Block,
    Kernel,
    cuda_kernel,
    flash_documents,
    flash_documents_backward,
    kernel_for,
    prefers_cudnn,
    repeated,
    summed,
)
from trainer.parallel.context.operator import attend_with_operator

KERNELS = [
    (torch.bfloat16, FLASH),
    (torch.float16, FLASH),
    (torch.float32, EFFICIENT),
    (torch.bfloat16, CUDNN),
    (torch.float16, CUDNN),
]


def random(
    heads: int, tokens: int, features: int = 8, dtype: torch.dtype = torch.float64, on: str = "cpu"
) -> torch.Tensor:
    return torch.randn(2, heads, tokens, features, dtype=dtype, device=on)


@pytest.mark.parametrize(("dtype", "kernel"), KERNELS)
@pytest.mark.parametrize(("queries", "keys", "causal"), [(20, 20, True), (10, 40, False)])
def test_kernels_for_cuda_accept_their_arguments(
    dtype: torch.dtype, kernel: Kernel, queries: int, keys: int, causal: bool
) -> None:
    """Without a GPU, torch checks the arguments and computes shapes, but no values."""
    with FakeTensorMode():
        q = random(4, queries, dtype=dtype, on="cuda")
        k, v = (random(2, keys, dtype=dtype, on="cuda") for _ in range(2))
        block = Block(q, k, v, 0.3, causal)
        answer = kernel.forward(block)
        gradients = kernel.backward(block, answer, q)
    assert answer.out_BHTD.shape == q.shape
    assert answer.out_BHTD.dtype == dtype
    assert answer.lse_BHT.shape == q.shape[:3]
    assert answer.lse_BHT.dtype == torch.float32
    assert [gradient.shape for gradient in gradients] == [q.shape, k.shape, v.shape]
    assert {gradient.dtype for gradient in gradients} == {dtype}


ENDS = ((5, 20), (20,))


def test_flash_attention_of_documents_accepts_its_arguments() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        q = random(4, 20, dtype=torch.bfloat16, on="cuda")
        k, v = (random(2, 20, dtype=torch.bfloat16, on="cuda") for _ in range(2))
        block = Block(q, k, v, 0.3, causal=True)
        answer = flash_documents(block, ENDS)
        gradients = flash_documents_backward(block, answer, q, ENDS)
    assert answer.out_BHTD.shape == q.shape
    assert answer.lse_BHT.shape == q.shape[:3]
    assert answer.lse_BHT.dtype == torch.float32
    assert [gradient.shape for gradient in gradients] == [q.shape, k.shape, v.shape]


@pytest.mark.gpu
def test_flash_attention_of_documents_equals_the_kernel_for_cpus() -> None:
    q, grad = (random(4, 20, 64, torch.float32) for _ in range(2))
    k, v = (random(2, 20, 64, torch.float32) for _ in range(2))
    here = Block(q, k, v, 0.125, causal=True)
    q, k, v = (it.to("cuda", torch.bfloat16) for it in (q, k, v))
    there = Block(q, k, v, 0.125, causal=True)
    expected, found = forward_own(CPU, here, ENDS), forward_own(FLASH, there, ENDS)
    torch.testing.assert_close(found.lse_BHT.cpu(), expected.lse_BHT, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(found.out_BHTD.cpu().float(), expected.out_BHTD, rtol=0, atol=3e-2)
    gradients = backward_own(FLASH, there, found, grad.to("cuda", torch.bfloat16), ENDS)
    expected_gradients = backward_own(CPU, here, expected, grad, ENDS)
    for ours, theirs in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(ours.cpu().float(), theirs, rtol=0, atol=1e-1)


def test_heads_too_long_for_flash_attention_use_the_other_kernel() -> None:
    with FakeTensorMode():
        assert kernel_for(random(1, 8, 256, torch.bfloat16, "cuda")) is FLASH
        assert kernel_for(random(1, 8, 264, torch.bfloat16, "cuda")) is EFFICIENT


@pytest.mark.parametrize(
    ("dtype", "head", "cudnn", "kernel"),
    [
        (torch.bfloat16, 128, True, CUDNN),
        (torch.float16, 64, True, CUDNN),
        (torch.bfloat16, 136, True, FLASH),
        (torch.bfloat16, 128, False, FLASH),
        (torch.float32, 64, True, EFFICIENT),
        (torch.bfloat16, 264, True, EFFICIENT),
    ],
)
def test_the_kernel_is_that_of_torch(
    dtype: torch.dtype, head: int, cudnn: bool, kernel: Kernel
) -> None:
    assert cuda_kernel(dtype, head, cudnn=cudnn) is kernel


def test_cudnn_comes_first_on_hopper_and_on_blackwell_of_data_centers() -> None:
    devices = [(8, 0), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0)]
    assert [it for it in devices if prefers_cudnn(it, 91_900)] == [(9, 0), (10, 0)]
    assert not prefers_cudnn((9, 0), 91_501)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", [FLASH, CUDNN, EFFICIENT])
@pytest.mark.parametrize(("queries", "keys", "causal"), [(64, 64, True), (32, 128, False)])
def test_kernels_for_cuda_equal_the_one_for_cpus(
    kernel: Kernel, queries: int, keys: int, causal: bool
) -> None:
    q, grad = (random(4, queries, 64, torch.float32) for _ in range(2))
    k, v = (random(2, keys, 64, torch.float32) for _ in range(2))
    here = Block(q, k, v, 0.125, causal)
    q, k, v = (it.to("cuda", torch.bfloat16) for it in (q, k, v))
    there = Block(q, k, v, 0.125, causal)
    expected, found = CPU.forward(here), kernel.forward(there)
    torch.testing.assert_close(found.lse_BHT.cpu(), expected.lse_BHT, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(found.out_BHTD.cpu().float(), expected.out_BHTD, rtol=0, atol=3e-2)
    gradients = kernel.backward(there, found, grad.to("cuda", torch.bfloat16))
    for ours, theirs in zip(gradients, CPU.backward(here, expected, grad), strict=True):
        torch.testing.assert_close(ours.cpu().float(), theirs, rtol=0, atol=1e-1)


def test_heads_of_any_length_are_padded_for_cuda() -> None:
    ranks: Any = SimpleNamespace(group_name="cp")
    asked: list[tuple[int, ...]] = []

    def operator(q: torch.Tensor, kv: torch.Tensor, *_: Any) -> Any:
        asked.extend([tuple(q.shape), tuple(kv.shape)])
        return q, None

    with FakeTensorMode():
        q, k, v = (random(heads, 16, 12, torch.bfloat16, "cuda") for heads in (4, 2, 2))
        out = attend_with_operator(operator, ranks)(q, k, v, 0.3, None)  # type: ignore[arg-type]
    assert asked == [(2, 4, 16, 16), (2, 2, 2, 16, 16)]
    assert out.shape == q.shape


def test_repeating_heads_and_adding_gradients_equals_grouped_attention() -> None:
    q, grad, k, v = (random(heads, 12) for heads in (6, 6, 2, 2))
    groups = Block(q, k, v, 0.3, causal=True)
    single = Block(q, *repeated(groups), 0.3, causal=True)
    expected, found = CPU.forward(groups), CPU.forward(single)
    torch.testing.assert_close(found.out_BHTD, expected.out_BHTD)
    dq, dk, dv = CPU.backward(single, found, grad)
    gradients = dq, summed(dk, k), summed(dv, v)
    torch.testing.assert_close(gradients, CPU.backward(groups, expected, grad))


def test_two_merged_blocks_equal_one_block() -> None:
    q, k, v = (random(2, 12) * 5 for _ in range(3))

    def answer(keys: slice) -> AttentionOutput:
        return CPU.forward(Block(q, k[:, :, keys], v[:, :, keys], 0.3, causal=False))

    first, whole = answer(slice(0, 5)), answer(slice(None))
    merge_(first.out_BHTD, first.lse_BHT, answer(slice(5, None)))
    torch.testing.assert_close(first.out_BHTD, whole.out_BHTD)
    torch.testing.assert_close(first.lse_BHT, whole.lse_BHT)


def test_a_block_with_zero_weight_changes_nothing() -> None:
    out, lse = torch.ones(1, 1, 2, 4), torch.zeros(1, 1, 2)
    merge_(out, lse, AttentionOutput(torch.full_like(out, 7.0), torch.tensor([[[-200.0, -1e30]]])))
    assert torch.equal(out, torch.ones(1, 1, 2, 4))
    assert torch.equal(lse, torch.zeros(1, 1, 2))
