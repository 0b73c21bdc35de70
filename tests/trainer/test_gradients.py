"""Norm and clipping of gradients on one rank. test_parity checks sharded gradients."""

import pytest
import torch
from torch import nn

from trainer.gradients import Parts, clip_factor, local_gradients, part_norms, scale, squared_norm

CPU = torch.device("cpu")


def squared(parts: Parts) -> float:
    return squared_norm(parts, part_norms(parts), CPU).item()


def model() -> nn.Module:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3, bias=False))
    module.extra = nn.Parameter(torch.zeros(3))  # not used, so it has no gradient
    module(torch.randn(4, 5)).square().sum().backward()
    return module


@pytest.mark.parametrize("limit", [0.5, 1e6, None])
def test_clipping_equals_that_of_torch(limit: float | None) -> None:
    ours, theirs = model(), model()
    parts = local_gradients(ours.parameters(), stage_ranks=1)
    norm = squared(parts) ** 0.5
    scale(parts, clip_factor(norm, limit))
    expected = nn.utils.clip_grad_norm_(theirs.parameters(), limit or float("inf"))
    assert norm == pytest.approx(expected.item(), rel=1e-6)
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        if other.grad is not None:
            assert mine.grad is not None
            torch.testing.assert_close(mine.grad, other.grad, rtol=1e-6, atol=0)


def test_replicated_gradients_count_once() -> None:
    parameters = [*model().parameters()]
    alone = squared(local_gradients(parameters, 1))
    shared = squared(local_gradients(parameters, 4))
    assert 4 * shared == pytest.approx(alone)


def test_a_rank_without_gradients_adds_zero_to_the_norm() -> None:
    assert squared([]) == 0.0
