"""What counts as a loss that spikes: robust against noise, trends and single outliers."""

import math
import random

import pytest

from orchestrator.contract.spec.train_spec import SpikeSpec
from trainer.guard import Skips, Spikes, loss_spike_error, not_finite_error

SPEC = SpikeSpec()


def walk(losses: list[float], spec: SpikeSpec = SPEC) -> list[int]:
    """The steps, from 1, after which the job would end."""
    spikes, found = Spikes(), []
    for step, loss in enumerate(losses, 1):
        spikes.seen(step, loss, spec)
        if spikes.high_in_a_row >= spec.steps:
            found.append(step)
    return found


def training(steps: int, noise: float, seed: int) -> list[float]:
    """The losses of a training that goes well: they fall by a power law, and are noisy."""
    drawn = random.Random(seed)
    return [2 + 8 * step**-0.4 + drawn.gauss(0, noise) for step in range(1, steps + 1)]


@pytest.mark.parametrize("noise", [0.0, 0.01, 0.1, 0.3])
def test_a_training_that_goes_well_never_spikes(noise: float) -> None:
    for seed in range(10):
        assert walk(training(2_000, noise, seed)) == []


@pytest.mark.parametrize("noise", [0.0, 0.01, 0.1])
def test_a_level_that_stays_higher_is_found_within_the_steps_that_were_asked_for(
    noise: float,
) -> None:
    losses = training(400, noise, 3)
    losses[300:] = [loss + 2.5 for loss in losses[300:]]
    assert walk(losses)[0] == 300 + SPEC.steps


def test_few_outliers_are_no_spike_and_not_part_of_the_baseline() -> None:
    losses = training(600, 0.01, 4)
    for at in range(200, 200 + SPEC.steps - 1):
        losses[at] = 50.0
    spikes = Spikes()
    for step, loss in enumerate(losses[:210], 1):
        spikes.seen(step, loss, SPEC)
    assert max(spikes.losses) < 5
    losses[300 : 300 + SPEC.steps] = [50.0] * SPEC.steps
    assert walk(losses) == [300 + SPEC.steps]


def test_nothing_is_judged_before_there_is_enough_to_compare_with() -> None:
    early = [3.0] * (SPEC.window - 1) + [90.0] * 8
    assert walk(early) == []
    assert walk([3.0] * SPEC.window + [90.0] * 8) == [SPEC.window + 8]


def test_a_loss_that_is_not_finite_neither_starts_nor_ends_a_spike() -> None:
    losses = [3.0] * SPEC.window + [90.0] * 5 + [math.nan, math.inf] + [90.0] * 3
    assert walk(losses) == [len(losses)]


def test_equal_losses_do_not_make_a_small_change_a_spike() -> None:
    assert walk([3.0] * 100 + [3.2] * 100) == []


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


def test_the_first_bad_step_is_remembered_over_steps_without_a_token() -> None:
    skips = Skips()
    for step in (4, 6, 7):
        skips.bad(step)
        skips.empty()
    assert (skips.bad_in_a_row, skips.since, skips.total) == (3, 4, 6)
    skips.learned()
    skips.bad(9)
    assert skips.since == 9


def test_an_error_says_what_where_and_what_to_do() -> None:
    bad = not_finite_error(7, 4, 3, "the loss is nan,", ["a.weight"])
    assert (bad.since, str(bad)[:23]) == (4, "step 7: the loss is nan")
    high = loss_spike_error(80, 73, 9.0, 4.5, SPEC)
    assert high.since == 73
    assert "for 8 steps in a row it was above 4.5000" in str(high)
