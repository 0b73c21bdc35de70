"""Detection of loss spikes, which ignores noise, trends and single outliers."""

import math
import random

import pytest

from orchestrator.contract.spec.train_spec import SpikeSpec
from trainer.guard import Skips, Spikes, loss_spike_error, not_finite_error

SPEC = SpikeSpec()


def steps_that_end(losses: list[float], spec: SpikeSpec = SPEC) -> list[int]:
    """The steps, counted from 1, after which the guard would end the job."""
    spikes, found = Spikes(), []
    for step, loss in enumerate(losses, 1):
        spikes.seen(step, loss, spec)
        if spikes.high_in_a_row >= spec.steps:
            found.append(step)
    return found


def healthy_losses(steps: int, noise: float, seed: int) -> list[float]:
    """Losses of a healthy training: a power law with noise."""
    drawn = random.Random(seed)
    return [2 + 8 * step**-0.4 + drawn.gauss(0, noise) for step in range(1, steps + 1)]


@pytest.mark.parametrize("noise", [0.0, 0.01, 0.1, 0.3])
def test_a_healthy_training_never_spikes(noise: float) -> None:
    for seed in range(10):
        assert steps_that_end(healthy_losses(2_000, noise, seed)) == []


@pytest.mark.parametrize("noise", [0.0, 0.01, 0.1])
def test_a_lasting_rise_is_found_within_the_configured_steps(noise: float) -> None:
    losses = healthy_losses(400, noise, 3)
    losses[300:] = [loss + 2.5 for loss in losses[300:]]
    assert steps_that_end(losses)[0] == 300 + SPEC.steps


def test_few_outliers_are_not_a_spike_and_do_not_change_the_baseline() -> None:
    losses = healthy_losses(600, 0.01, 4)
    for at in range(200, 200 + SPEC.steps - 1):
        losses[at] = 50.0
    spikes = Spikes()
    for step, loss in enumerate(losses[:210], 1):
        spikes.seen(step, loss, SPEC)
    assert max(spikes.losses) < 5
    losses[300 : 300 + SPEC.steps] = [50.0] * SPEC.steps
    assert steps_that_end(losses) == [300 + SPEC.steps]


def test_no_spike_is_found_before_the_window_is_full() -> None:
    early = [3.0] * (SPEC.window - 1) + [90.0] * 8
    assert steps_that_end(early) == []
    assert steps_that_end([3.0] * SPEC.window + [90.0] * 8) == [SPEC.window + 8]


def test_a_loss_that_is_not_finite_neither_starts_nor_ends_a_spike() -> None:
    losses = [3.0] * SPEC.window + [90.0] * 5 + [math.nan, math.inf] + [90.0] * 3
    assert steps_that_end(losses) == [len(losses)]


def test_equal_losses_do_not_make_a_small_change_a_spike() -> None:
    assert steps_that_end([3.0] * 100 + [3.2] * 100) == []


def test_the_state_survives_a_checkpoint() -> None:
    losses = [3.0] * SPEC.window + [90.0] * SPEC.steps
    cut, spikes = SPEC.window + 5, Spikes()
    for step, loss in enumerate(losses[:cut], 1):
        spikes.seen(step, loss, SPEC)
    after = Spikes()
    after.restore(spikes)
    for step, loss in enumerate(losses[cut:], cut + 1):
        after.seen(step, loss, SPEC)
    assert (after.high_in_a_row, after.since) == (SPEC.steps, SPEC.window + 1)


def test_the_first_bad_step_is_kept_over_steps_without_a_token() -> None:
    skips = Skips()
    for step in (4, 6, 7):
        skips.bad(step)
        skips.empty()
    assert (skips.bad_in_a_row, skips.since, skips.total) == (3, 4, 6)
    skips.learned()
    skips.bad(9)
    assert skips.since == 9


def test_an_error_names_the_step_the_cause_and_the_fix() -> None:
    bad = not_finite_error(7, 4, 3, "the loss is nan,", ["a.weight"])
    assert (bad.since, str(bad)[:23]) == (4, "step 7: the loss is nan")
    high = loss_spike_error(80, 73, 9.0, 4.5, SPEC)
    assert high.since == 73
    assert "for 8 steps in a row it was above 4.5000" in str(high)
