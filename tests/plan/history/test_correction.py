"""What earlier jobs change in a plan, and what they must not change."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from orchestrator.contract.plan import Plan
from orchestrator.inventory.profile import Fabric
from orchestrator.inventory.profiles import load_profile
from orchestrator.plan.cost.step import step_time
from orchestrator.plan.history.correction import (
    BOUNDS,
    MOST_JOBS,
    Observed,
    corrected,
    likeness,
    observed,
    posterior,
)
from orchestrator.plan.setup import Setup
from orchestrator.plan.show.explain import describe_plan, plan_json
from tests.plan.history.jobs import H100, planned, ran, record, setup


@pytest.fixture(scope="module")
def plan() -> Plan:
    return planned()


@pytest.fixture(scope="module")
def its_setup() -> Setup:
    return setup()


def width(plan: Plan) -> float:
    assert plan.time is not None
    assert plan.time.tokens_per_second_per_device_range is not None
    low, high = plan.time.tokens_per_second_per_device_range
    return math.log(high / low)


def factor(plan: Plan) -> float:
    assert plan.time is not None
    return 1.0 if plan.time.correction is None else plan.time.correction.factor


def test_the_setup_of_a_job_is_predicted_as_its_plan_says(plan: Plan, its_setup: Setup) -> None:
    assert plan.time is not None
    assert step_time(its_setup, H100).step_s == pytest.approx(plan.time.step_s)


def test_more_jobs_move_the_plan_to_what_they_measured_and_narrow_its_range(
    plan: Plan, its_setup: Setup
) -> None:
    jobs = [record(its_setup, 1.1, number) for number in range(20)]
    several = [corrected(plan, its_setup, H100, jobs[:count]) for count in (1, 3, 8, 20)]
    factors = [factor(one) for one in several]
    assert factors == sorted(factors, reverse=True)
    assert 1 / 1.1 < factors[0] < 1
    assert factors[-1] == pytest.approx(1 / 1.1, rel=0.01)
    widths = [width(one) for one in (plan, *several)]
    assert widths == sorted(widths, reverse=True)


def test_every_time_of_a_plan_changes_alike_and_the_mesh_stays(
    plan: Plan, its_setup: Setup
) -> None:
    found = corrected(plan, its_setup, H100, [record(its_setup, 1.2, n) for n in range(9)])
    assert plan.time is not None
    assert found.time is not None
    change = found.time.step_s / plan.time.step_s
    assert change == pytest.approx(1 / factor(found))
    assert sum(found.time.parts.values()) == pytest.approx(found.time.step_s)
    assert found.time.mfu == pytest.approx(plan.time.mfu / change)
    for one, before in zip(found.alternatives, plan.alternatives, strict=True):
        assert one.step_s == pytest.approx(before.step_s * change)
    for flow, earlier in zip(found.communication, plan.communication, strict=True):
        assert flow.seconds == pytest.approx(earlier.seconds * change)
    assert (found.mesh, found.memory, found.hosts) == (plan.mesh, plan.memory, plan.hosts)


def test_the_screen_and_the_json_say_what_was_used(plan: Plan, its_setup: Setup) -> None:
    found = corrected(plan, its_setup, H100, [record(its_setup, 1.2, n) for n in range(3)])
    text = " ".join(describe_plan(found).split())
    assert "history measured speed of 3 earlier jobs of llama on h100-sxm-80gb: planned x0." in text
    assert "--no-history" in text
    assert plan_json(found)["time"]["correction"]["jobs"] == 3
    assert "history" not in describe_plan(plan)
    assert plan_json(plan)["time"]["correction"] is None


def test_one_job_on_a_busy_machine_does_not_move_the_median_of_many(
    plan: Plan, its_setup: Setup
) -> None:
    jobs = [record(its_setup, 1.05, number) for number in range(8)]
    spoilt = [*jobs, record(its_setup, 6.0, 99)]
    right, wrong = (corrected(plan, its_setup, H100, some) for some in (jobs, spoilt))
    assert factor(wrong) == pytest.approx(factor(right), rel=0.04)
    assert width(wrong) > width(right), "jobs that disagree widen the range"


def test_a_job_of_another_family_device_or_number_format_does_not_count(
    plan: Plan, its_setup: Setup
) -> None:
    shape = replace(its_setup.shape, model_type="qwen2")
    foreign = [
        record(replace(its_setup, shape=shape), 2.0, 1),
        record(its_setup, 2.0, 2, profile="a100-sxm-80gb"),
        record(replace(its_setup, dtype="float32"), 2.0, 3),
        record(replace(its_setup, float8=True), 2.0, 4),
    ]
    assert corrected(plan, its_setup, H100, foreign) is plan


def test_a_job_that_ran_differently_counts_less(its_setup: Setup) -> None:
    assert likeness(its_setup, its_setup) == 1
    assert likeness(its_setup, replace(its_setup, compile=True)) == 0.5
    longer = replace(its_setup, tokens=64 * 1024, checkpointing="full")
    assert likeness(its_setup, longer) == 0.25
    small = replace(its_setup, shape=replace(its_setup.shape, num_layers=2))
    assert likeness(its_setup, small) == likeness(small, its_setup) == 0.5


def test_a_record_that_was_written_twice_counts_once_and_only_new_jobs_count(
    its_setup: Setup,
) -> None:
    assert len(observed(its_setup, H100, [record(its_setup)] * 5)) == 1
    many = [record(its_setup, 3.0, number) for number in range(50)]
    many += [record(its_setup, 1.0, 100 + number) for number in range(MOST_JOBS)]
    assert {round(one.log_ratio, 6) for one in observed(its_setup, H100, many)} == {0.0}


def test_times_that_cannot_be_true_are_ignored_and_a_correction_is_bounded(
    plan: Plan, its_setup: Setup
) -> None:
    assert not observed(its_setup, H100, [record(its_setup, 1e-3), record(its_setup, 1e3, 2)])
    slow = corrected(plan, its_setup, H100, [record(its_setup, 9.0, n) for n in range(64)])
    assert factor(slow) == BOUNDS[True][0]


def test_a_combination_of_values_that_no_plan_has_is_ignored(its_setup: Setup) -> None:
    odd = [
        replace(its_setup, shape=replace(its_setup.shape, num_heads=0, head_dim=0)),
        replace(its_setup, optimizer="unheard-of"),
        replace(its_setup, dtype="bfloat16", reduce_dtype="int3"),
    ]
    made = [record(its_setup, 1.0, number, setup=one) for number, one in enumerate(odd)]
    for one in made:
        assert len(observed(its_setup, H100, [one])) <= 1


def test_guessed_constants_may_be_corrected_much_further() -> None:
    profile = load_profile("cpu")
    fabric = Fabric(profile=profile, hosts=2, devices_per_host=2)
    quick: dict[str, Any] = {"spec": "quickstart.yaml"}
    plan, _ = ran(**quick)
    one = replace(setup(**quick), dtype="float32")
    time = step_time(one, fabric)
    jobs = [record(one, 8.0, number, fabric) for number in range(6)]
    found = corrected(replace(plan, time=time), one, fabric, jobs)
    assert factor(found) == pytest.approx(1 / 8, rel=0.1)
    assert width(found) < math.log(1.5 / 0.5)


@given(
    st.lists(
        st.tuples(st.floats(-2.9, 2.9), st.sampled_from([1.0, 0.5, 0.25])), min_size=1, max_size=70
    ),
    st.floats(0.3, 0.99),
    st.floats(1.01, 3.0),
)
def test_any_observations_give_a_factor_inside_its_range_and_bounds(
    seen: list[tuple[float, float]], low: float, high: float
) -> None:
    time = step_time(_SETUP, H100)
    speed = time.tokens_per_second_per_device
    time = replace(time, tokens_per_second_per_device_range=(speed * low, speed * high))
    found = posterior(time, [Observed(*one) for one in seen])
    assert BOUNDS[True][0] <= found.factor <= BOUNDS[True][1]
    assert 0 < found.low <= found.factor <= found.high < math.inf


_SETUP = setup()
