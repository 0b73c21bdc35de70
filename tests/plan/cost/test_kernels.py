"""Times of single operations compared with published measurements."""

import math

import pytest

from orchestrator.plan.cost.kernels import attention_s, matmul_s, move_s
from orchestrator.plan.cost.machine import machine_of
from tests.plan.cost.setups import H100, fabric

MACHINE = machine_of(H100)
# OpenXLA, service/gpu/model/matmul_interpolator_data.h: bfloat16 on an H100, 1e12 operations a
# second of a single product. `tiles`, `split` and `depth_half` were fitted to these and others.
PRODUCTS = [
    (1024, 4096, 4096, 738),
    (2048, 4096, 4096, 754),
    (4096, 4096, 1024, 677),
    (512, 4096, 4096, 644),
    (1024, 1024, 4096, 470),
    (4096, 256, 4096, 376),
    (1024, 4096, 512, 339),
    (2048, 4096, 256, 299),
    (1024, 1024, 1024, 236),
    (4096, 1024, 2048, 632),
    (256, 4096, 1024, 225),
]
ALONE_S = 5e-6
"""A single product takes this many seconds longer."""
# Shah et al. 2024, figure 5: FlashAttention-2 on H100, heads of 128, causal, 16k tokens in total.
ATTENTION = [(512, 191), (1024, 260), (2048, 298), (4096, 319), (8192, 333), (16384, 335)]
# Figure 6: backward.
BACKWARD = [(512, 214), (1024, 260), (2048, 291), (4096, 310), (8192, 318), (16384, 322)]


def tera(rows: int, columns: int, inner: int) -> float:
    seconds = matmul_s(MACHINE, rows, columns, inner, "bfloat16")
    # The measured chip ran at its full clock. The calibrated profile has the sustained clock.
    full = 900e12 / MACHINE.rates["bfloat16"]
    seconds = (seconds - MACHINE.calibration.gap_s) / full + ALONE_S
    return 2 * rows * columns * inner / seconds / 1e12


def test_products_are_as_fast_as_measured_within_a_tenth_on_average() -> None:
    errors = [math.log(tera(m, n, k) / measured) for m, n, k, measured in PRODUCTS]
    assert math.sqrt(sum(error**2 for error in errors) / len(errors)) < 0.1
    assert max(abs(error) for error in errors) < 0.2


@pytest.mark.parametrize(("profile", "measured"), [("a100-sxm-80gb", 257), ("h100-sxm-80gb", 750)])
def test_a_large_product_of_random_numbers_runs_at_the_sustained_rate(
    profile: str, measured: float
) -> None:
    """8192 cubed. A100: H. He, "Strangely, Matrix Multiplications on GPUs Run Faster When Given
    Predictable Data". H100: its MAMF, scaled by the ratio of the A100 value to the A100's MAMF."""
    seconds = matmul_s(machine_of(fabric(profile)), 8192, 8192, 8192, "bfloat16")
    assert 2 * 8192**3 / seconds / 1e12 == pytest.approx(measured, rel=0.03)


def test_thin_products_are_bound_by_memory() -> None:
    seconds = matmul_s(MACHINE, 16, 4096, 4096, "bfloat16")
    assert seconds > 2 * 4096 * 4096 / H100.profile.memory_bytes_per_s


@pytest.mark.parametrize(("tokens", "measured"), ATTENTION)
def test_attention_is_as_fast_as_measured(tokens: int, measured: float) -> None:
    scores = 16384 * tokens / 2
    forward, _ = attention_s(MACHINE, scores, 2048, 128, tokens)
    assert 4 * scores * 2048 / forward / 1e12 == pytest.approx(measured, rel=0.12)


@pytest.mark.parametrize(("tokens", "measured"), BACKWARD)
def test_the_backward_pass_of_attention_is_as_fast_as_measured(
    tokens: int, measured: float
) -> None:
    scores = 16384.0 * tokens
    _, backward = attention_s(MACHINE, scores, 2048, 128, tokens)
    assert 10 * scores * 2048 / backward / 1e12 == pytest.approx(measured, rel=0.12)


def test_narrow_and_wide_heads_are_slower() -> None:
    forward = [attention_s(MACHINE, 1e8, 2048, head, 4096)[0] for head in (64, 128, 256)]
    assert forward[1] < min(forward[0], forward[2])


def test_memory_moves_at_the_speed_of_the_triad_benchmark() -> None:
    """3089e9 bytes per second of 3350e9."""
    assert 3089e9 * move_s(MACHINE, 1) == pytest.approx(1, rel=0.01)


def test_less_power_slows_products_more_than_memory() -> None:
    slower = machine_of(fabric("h100-sxm-96gb-500w"))
    of_full = slower.rates["bfloat16"] / MACHINE.rates["bfloat16"]
    assert 0.75 < of_full < 0.9
    assert of_full < slower.attention[0] / MACHINE.attention[0] < 1
    assert slower.calibration.certainty == "derived"
