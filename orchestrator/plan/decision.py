"""What a job takes until it is done: time, GPU-hours, money and energy.

Everything follows from the speed of a plan, so each value has the range of the speed. The share of
time that is lost to failures comes from the caller, because `forecast` is above this room.
"""

from typing import NamedTuple

from msgspec import Struct

from orchestrator.contract.devices import CPU
from orchestrator.contract.plan import Plan

DAY_S = 86400.0
HOUR_S = 3600.0


class Target(Struct, frozen=True, kw_only=True):
    """How much the job trains, and what it costs an hour."""

    tokens: float
    tokens_from: str
    """The key or option that says so, such as `train.steps=1000`."""
    tokens_per_step: int
    effective: float | None = None
    """Share of the time in which the job trains and keeps the result; None: not known; 0: failures
    come so often that it never finishes."""
    effective_from: str = ""
    """What `effective` rests on."""
    price: float | None = None
    """Of one GPU for an hour; None: as in the inventory."""
    usual_price: float | None = None
    """The user's setting, if the inventory has no price."""
    spare_hosts: int = 0
    """Held by the job as well."""


class Estimate(NamedTuple):
    expected: float
    range: tuple[float, float] | None
    """As that of the speed; None: unknown."""

    def times(self, factor: float) -> "Estimate":
        low_high = None if self.range is None else (self.range[0] * factor, self.range[1] * factor)
        return Estimate(self.expected * factor, low_high)


class Decision(Struct, frozen=True, kw_only=True):
    target: Target
    steps: float
    """Optimizer steps until the tokens are trained."""
    tokens_per_day: Estimate
    training_s: Estimate
    """Without failures."""
    with_failures_s: Estimate | None
    """None: their rate is unknown, or the job would never finish."""
    gpu_hours: Estimate | None
    """Of all devices that the job holds, spares included; with failures where they are known. None
    without GPUs."""
    price: float | None
    price_from: str
    money: Estimate | None
    """None: no price is known."""
    device_power_w: int | None
    energy_kwh: Estimate | None
    """At most, of the boards of the ranks' devices; None: their power is unknown."""


def decide(plan: Plan, target: Target) -> Decision | None:
    """None for a plan without a predicted speed."""
    if plan.time is None:
        return None
    ranks = plan.world_size
    speed = Estimate(
        plan.time.tokens_per_second_per_device * ranks,
        _times(plan.time.tokens_per_second_per_device_range, ranks),
    )
    training = _duration(target.tokens, speed)
    lossy = training.times(1 / target.effective) if target.effective else None
    held = ranks + target.spare_hosts * plan.ranks_per_host
    hours = (lossy or training).times(1 / HOUR_S)
    gpu_hours = None if plan.profile == CPU else hours.times(held)
    price, price_from = _price(plan, target)
    watts = plan.device_power_w
    return Decision(
        target=target,
        steps=target.tokens / target.tokens_per_step,
        tokens_per_day=speed.times(DAY_S),
        training_s=training,
        with_failures_s=lossy,
        gpu_hours=gpu_hours,
        price=price,
        price_from=price_from,
        money=None if price is None or gpu_hours is None else gpu_hours.times(price),
        device_power_w=watts,
        energy_kwh=None if watts is None else hours.times(ranks * watts / 1000),
    )


def _price(plan: Plan, target: Target) -> tuple[float | None, str]:
    """The price of a GPU for an hour, and who says so."""
    if target.price is not None:
        return target.price, "--price"
    if plan.price_per_gpu_hour is None and target.usual_price is not None:
        return target.usual_price, "your settings"
    return plan.price_per_gpu_hour, "the inventory"


def _times(found: tuple[float, float] | None, factor: float) -> tuple[float, float] | None:
    return None if found is None else (found[0] * factor, found[1] * factor)


def _duration(tokens: float, speed: Estimate) -> Estimate:
    """Seconds. The highest speed gives the shortest time."""
    if speed.range is None:
        return Estimate(tokens / speed.expected, None)
    slow, fast = speed.range
    return Estimate(tokens / speed.expected, (tokens / fast, tokens / slow))
