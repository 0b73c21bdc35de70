"""The loss on one rank. test_loop checks a vocabulary that is sharded over ranks."""

from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from orchestrator.contract.spec.train_spec import TrainSpec, chunks_of_loss
from trainer.loss import TokenLoss
from trainer.model.chunked_loss import NOT_LEARNED

CPU = torch.device("cpu")
TOKENS, FEATURES, VOCABULARY = 8, 5, 9


def loss_with(recompute: bool = False, device: torch.device = CPU, **train: Any) -> TokenLoss:
    spec = TrainSpec(steps=1, global_batch_size=1, **train)
    return TokenLoss(16, device, spec, recompute=recompute)


def inputs(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, weights of a head, and labels, three of which are not learned."""
    torch.manual_seed(0)
    labels_BT = torch.randint(0, VOCABULARY, (2, TOKENS // 2))
    labels_BT[0, :3] = NOT_LEARNED
    hidden_BTD = torch.randn(2, TOKENS // 2, FEATURES, dtype=dtype, requires_grad=True)
    return hidden_BTD, torch.randn(VOCABULARY, FEATURES, dtype=dtype, requires_grad=True), labels_BT


def reference(
    hidden_BTD: torch.Tensor, weight_VD: torch.Tensor, labels_BT: torch.Tensor, z: float
) -> torch.Tensor:
    """The same by autograd from whole logits in float64."""
    logits_NV = (hidden_BTD.double() @ weight_VD.double().T).flatten(0, 1)
    labels_N = labels_BT.flatten()
    loss = cross_entropy(logits_NV, labels_N, ignore_index=NOT_LEARNED, reduction="sum")
    learned_N = labels_N != NOT_LEARNED
    return (loss + z * logits_NV.logsumexp(-1)[learned_N].square().sum()) / 16


@pytest.mark.parametrize("z", [0.0, 0.25])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("chunks", [1, 2, 3, TOKENS, 100])
def test_value_and_gradients_are_those_of_whole_logits(
    chunks: int, recompute: bool, z: float
) -> None:
    hidden, weight, labels = inputs()
    expected = reference(hidden, weight, labels, z)
    wanted = torch.autograd.grad(expected, (hidden, weight))
    loss = loss_with(recompute, loss_chunks=chunks, z_loss=z or None)
    found = loss(hidden, weight, labels)
    found.backward()
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)
    torch.testing.assert_close(hidden.grad, wanted[0].float(), rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(weight.grad, wanted[1].float(), rtol=1e-5, atol=1e-7)
    sums = loss.pop_sums()
    assert sums.tokens.item() == 5
    assert found.item() == pytest.approx((sums.loss + sums.z_loss).item() / 16, rel=1e-6)
    assert (sums.z_loss.item() > 0) == (z > 0)
    assert loss.pop_sums().loss.item() == 0


@pytest.mark.parametrize("size", [1e2, 1e4, 1e15])
def test_gradients_of_extreme_logits_are_right(size: float) -> None:
    """As in a run that diverges, whose loss must stay finite until it is reported as a spike."""
    hidden, weight, labels = inputs()
    weight = (size * weight.detach()).requires_grad_()
    expected = reference(hidden, weight, labels, 0.0)
    wanted = torch.autograd.grad(expected, (hidden, weight))
    found = loss_with(loss_chunks=2)(hidden, weight, labels)
    found.backward()
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)
    for leaf, exact in zip((hidden, weight), wanted, strict=True):
        assert leaf.grad is not None
        assert (leaf.grad - exact).norm() <= 1e-4 * exact.norm()


def test_a_frozen_head_gets_no_gradient() -> None:
    hidden, weight, labels = inputs()
    loss_with(loss_chunks=2)(hidden, weight.detach(), labels).backward()
    assert hidden.grad is not None


def test_without_gradients_the_sums_are_the_same() -> None:
    hidden, weight, labels = inputs()
    training, evaluation = loss_with(loss_chunks=2), loss_with(loss_chunks=2)
    training(hidden, weight, labels)
    with torch.no_grad():
        evaluation(hidden, weight, labels)
    assert evaluation.pop_sums().loss == training.pop_sums().loss


@pytest.mark.parametrize("chunks", [1, 4])
def test_bfloat16_is_as_close_as_autograd_is(chunks: int) -> None:
    hidden, weight, labels = inputs(torch.bfloat16)
    wanted = torch.autograd.grad(reference(hidden, weight, labels, 0.0), (hidden, weight))
    loss_with(loss_chunks=chunks)(hidden, weight, labels).backward()
    for found, exact in zip((hidden.grad, weight.grad), wanted, strict=True):
        assert found is not None
        assert found.dtype == torch.bfloat16
        torch.testing.assert_close(found.float(), exact.float(), rtol=0.03, atol=0.002)


def test_under_autocast_the_products_are_in_bfloat16_and_the_sums_in_float32() -> None:
    hidden, weight, labels = inputs()
    with torch.autocast("cpu", torch.bfloat16):
        rounded = loss_with(loss_chunks=2)(hidden, weight, labels)
    rounded.backward()
    exact = reference(hidden, weight, labels, 0.0).item()
    assert rounded.item() == pytest.approx(exact, rel=0.02)
    assert rounded.item() != pytest.approx(exact, rel=1e-6)
    assert weight.grad is not None
    assert weight.grad.dtype == torch.float32


def test_without_learned_tokens_the_gradients_are_zero() -> None:
    hidden, weight, labels = inputs()
    loss = loss_with(z_loss=1.0)
    loss(hidden, weight, torch.full_like(labels, NOT_LEARNED)).backward()
    assert loss.pop_sums().tokens.item() == 0
    for leaf in (hidden, weight):
        assert leaf.grad is not None
        assert not leaf.grad.any()


def test_large_logits_do_not_overflow() -> None:
    hidden, labels = torch.full((1, 1, 1), 1e4), torch.zeros(1, 1, dtype=torch.long)
    loss = loss_with(z_loss=1e-9)
    loss(hidden, torch.ones(2, 1), labels)
    sums = loss.pop_sums()
    assert sums.loss.item() == pytest.approx(0.6931, rel=1e-4)
    assert sums.z_loss.item() == pytest.approx(1e-9 * (1e4 + 0.6931) ** 2)


@pytest.mark.parametrize(
    ("wish", "tokens", "chunks"),
    [
        ("auto", 64, 1),
        ("auto", 2048, 2),
        ("auto", 8192, 8),
        ("auto", 65536, 8),
        (4, 8192, 4),
        (4, 2, 2),
    ],
)
def test_number_of_chunks(wish: Any, tokens: int, chunks: int) -> None:
    assert chunks_of_loss(wish, tokens) == chunks


def test_a_factor_behind_the_loss_is_refused() -> None:
    with pytest.raises(RuntimeError):
        (2 * loss_with()(*inputs())).backward()
