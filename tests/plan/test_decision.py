"""What a job takes until it is done."""

import pytest
from msgspec.structs import replace

from orchestrator.contract.mesh import Mesh
from orchestrator.contract.plan import Plan, StepTime
from orchestrator.plan.decision import Decision, Estimate, Target, decide
from orchestrator.plan.figures import read_amount, show_amount, show_duration
from orchestrator.plan.show.decision import decision_json, describe_decision, headline

HOUR = 3600.0
PLAN = Plan(
    mesh=Mesh(dp_shard=16),
    micro_batch_size=1,
    gradient_accumulation=1,
    hosts=("host-0", "host-1"),
    ranks_per_host=8,
    memory=None,
    profile="h100-sxm-80gb",
    device_power_w=700,
    time=StepTime(
        step_s=1.0,
        tokens_per_second_per_device=1000.0,
        mfu=0.4,
        parts={"compute": 1.0},
        confidence="12 comparable published runs",
        tokens_per_second_per_device_range=(800.0, 1250.0),
    ),
)
TARGET = Target(tokens=16_000 * HOUR, tokens_from="--tokens", tokens_per_step=16_000)


def decided(plan: Plan = PLAN, **more: object) -> Decision:
    found = decide(plan, replace(TARGET, **more))
    assert found is not None
    return found


def test_time_gpu_hours_and_energy_follow_from_the_speed_and_its_range() -> None:
    found = decided()
    assert found.steps == HOUR
    assert found.tokens_per_day == Estimate(16_000 * 24 * HOUR, (12_800 * 86400, 20_000 * 86400))
    # The fastest speed gives the shortest time.
    assert found.training_s == Estimate(HOUR, (HOUR / 1.25, HOUR / 0.8))
    assert found.gpu_hours == pytest.approx(Estimate(16, (12.8, 20)))
    assert found.energy_kwh is not None
    assert found.energy_kwh.expected == pytest.approx(16 * 0.7)
    assert found.money is None


def test_failures_and_spares_cost_gpu_hours_and_money() -> None:
    found = decided(effective=0.8, effective_from="as measured", spare_hosts=1, price=2.5)
    assert found.with_failures_s is not None
    assert found.with_failures_s.expected == pytest.approx(HOUR / 0.8)
    assert found.gpu_hours is not None
    assert found.gpu_hours.expected == pytest.approx(24 / 0.8)
    assert found.money is not None
    assert found.money.expected == pytest.approx(2.5 * 24 / 0.8)
    # Spare hosts do not compute, so only the boards of ranks count.
    assert found.energy_kwh is not None
    assert found.energy_kwh.expected == pytest.approx(16 * 0.7 / 0.8)
    assert headline(found) == "1.00 h, 1.25 h with failures: --tokens, 57.6M tokens"


def test_the_option_has_priority_over_the_price_of_the_inventory() -> None:
    priced = replace(PLAN, price_per_gpu_hour=2.0)
    assert (decided(priced).price, decided(priced).price_from) == (2.0, "the inventory")
    assert (decided(priced, price=3.0).price, decided(priced, price=3.0).price_from) == (
        3.0,
        "--price",
    )
    # A price of 0 is a price: the hosts are paid for.
    assert decided(priced, price=0.0).money == Estimate(0.0, (0.0, 0.0))


def test_a_job_that_fails_more_often_than_it_saves_never_finishes() -> None:
    found = decided(effective=0.0, effective_from="at these rates")
    assert found.with_failures_s is None
    assert "would never finish at these rates" in "\n".join(describe_decision(found))


def test_what_is_not_known_is_said() -> None:
    bare = replace(PLAN, device_power_w=None)
    told = "\n".join(describe_decision(decided(bare)))
    assert "money: no price (--price" in told
    assert "the power of the devices is unknown" in told
    assert decide(replace(PLAN, time=None), TARGET) is None
    # CPU ranks have no GPU-hours.
    cpu = decided(replace(bare, profile="cpu"), price=2.5)
    assert (cpu.gpu_hours, cpu.money) == (None, None)
    assert decision_json(cpu)["gpu_hours_range"] is None


def test_json_has_every_value_with_its_range() -> None:
    body = decision_json(decided(price=2.0, effective=0.5))
    for key in ("tokens_per_day", "training_s", "with_failures_s", "gpu_hours", "money"):
        low, high = body[f"{key}_range"]
        assert low < body[key] < high


@pytest.mark.parametrize(
    ("text", "count"),
    [("15T", 15e12), ("300B", 3e11), ("1.5e12", 1.5e12), ("2m", 2e6), (" 7k ", 7e3), ("1", 1)],
)
def test_amounts_are_read(text: str, count: float) -> None:
    assert read_amount(text) == count


@pytest.mark.parametrize("text", ["", "T", "0", "-1B", "nan", "inf", "1e30", "15 trillion", "1_"])
def test_other_amounts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"count|float"):
        read_amount(text)


def test_amounts_and_durations_are_shown_with_three_digits() -> None:
    assert [*map(show_amount, (3.14159, 1234.5, 1.5e6, 2e9, 15e12))] == [
        "3.14",
        "1,234",
        "1.50M",
        "2.00B",
        "15.0T",
    ]
    shown = [*map(show_duration, (0.5, 90, 200, 5400, 90_000, 86400 * 58.2))]
    assert shown == ["500 ms", "90.0 s", "3.33 min", "1.50 h", "25.0 h", "58.2 days"]
