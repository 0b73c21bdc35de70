"""The loss on one rank. test_loop checks logits that are sharded over ranks."""

import pytest
import torch

from trainer.loss import NOT_LEARNED, TokenLoss, log_sum_exp

CPU = torch.device("cpu")


def logits_and_labels() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    labels_BT = torch.randint(0, 9, (2, 4))
    labels_BT[0, :3] = NOT_LEARNED
    return 5 * torch.randn(2, 4, 9, requires_grad=True), labels_BT


def test_z_loss_is_the_squared_log_normaliser_of_learned_tokens() -> None:
    logits_BTV, labels_BT = logits_and_labels()
    loss = TokenLoss(tokens_per_step=16, device=CPU, z_weight=0.25)
    returned = loss(logits_BTV, labels_BT)
    sums = loss.take()
    learned = labels_BT != NOT_LEARNED
    z = logits_BTV.detach().exp().sum(-1).log()[learned]
    assert sums.tokens.item() == 5
    assert sums.z_loss.item() == pytest.approx(0.25 * z.square().sum().item(), rel=1e-6)
    assert returned.item() == pytest.approx((sums.loss + sums.z_loss).item() / 16, rel=1e-6)
    assert loss.take().z_loss.item() == 0.0


def test_without_z_loss_none_is_reported() -> None:
    loss = TokenLoss(tokens_per_step=8, device=CPU)
    returned = loss(*logits_and_labels())
    sums = loss.take()
    assert sums.z_loss.item() == 0.0
    assert returned.item() == pytest.approx(sums.loss.item() / 8)


def test_without_learned_tokens_the_gradient_is_zero() -> None:
    logits_BTV, labels_BT = logits_and_labels()
    loss = TokenLoss(tokens_per_step=8, device=CPU, z_weight=1.0)
    loss(logits_BTV, torch.full_like(labels_BT, NOT_LEARNED)).backward()
    assert loss.take().tokens.item() == 0


def test_large_logits_do_not_overflow() -> None:
    assert log_sum_exp(torch.tensor([[1e4, 1e4]])).item() == pytest.approx(1e4 + 0.6931)
