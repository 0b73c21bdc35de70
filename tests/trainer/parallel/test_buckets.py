"""Buckets of gradients: their order and size, and buffers that replace gradients without a copy."""

import torch
from torch import nn

from trainer.parallel.buckets import BUCKET_BYTES, bucketed
from trainer.parallel.ddp import flattened
from trainer.parallel.zero1 import Layout, by_rank


def parameters(*sizes: int) -> list[nn.Parameter]:
    """Parameters of these many bytes, without storage."""
    return [nn.Parameter(torch.empty(size // 4, device="meta")) for size in sizes]


def sizes_of(groups: list[list[nn.Parameter]]) -> list[list[int]]:
    return [[parameter.numel() * 4 for parameter in group] for group in groups]


def test_large_parameters_are_alone_and_small_ones_share_a_bucket() -> None:
    large, half, few = BUCKET_BYTES, BUCKET_BYTES // 2, 4096
    found = sizes_of(bucketed(parameters(half, few, large, few, 2 * large, half, half)))
    # From the last parameter to the first, as the backward pass computes their gradients.
    assert found == [[half, half], [2 * large], [large], [few, few, half]]
    assert bucketed([]) == []


def test_a_single_gradient_is_reduced_where_it_is() -> None:
    gradient = torch.arange(24.0).view(6, 4)
    flat, parts = flattened([gradient], torch.float32)
    assert flat.data_ptr() == parts[0].data_ptr() == gradient.data_ptr()
    everyone = by_rank([gradient], Layout([gradient.shape], 3), torch.float32)
    assert everyone.data_ptr() == gradient.data_ptr()
    assert everyone.tolist() == list(range(24))


def test_gradients_of_another_type_or_form_are_copied() -> None:
    gradient = torch.arange(24.0).view(6, 4)
    for given in (gradient.bfloat16(), gradient.t().contiguous().t()):
        flat, parts = flattened([given], torch.float32)
        assert torch.equal(parts[0], gradient)
        assert flat.data_ptr() == parts[0].data_ptr() != given.data_ptr()
    # With four ranks the rows need padding.
    everyone = by_rank([gradient], Layout([gradient.shape], 4), torch.float32)
    assert everyone.tolist() == [*range(24), *[0] * 8]


def test_several_gradients_become_views_of_one_buffer() -> None:
    gradients = [torch.full((2, 3), 1.0), torch.full((5,), 2.0)]
    flat, parts = flattened(gradients, torch.float32)
    flat += 1
    assert [part.tolist() for part in parts] == [[[2.0] * 3] * 2, [3.0] * 5]
    assert [part.untyped_storage().data_ptr() for part in parts] == [flat.data_ptr()] * 2
