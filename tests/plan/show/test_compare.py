"""Comparison of plans in a table."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from orchestrator.app.planning.comparison import compare_plans
from orchestrator.app.planning.decisions import Wish
from orchestrator.contract.plan import Plan
from orchestrator.errors import SpecError
from orchestrator.plan.decision import Target, decide
from orchestrator.plan.show.compare import Compared, compared_json, describe_compared
from orchestrator.plan.show.tables import WIDTH
from tests.plan.show.test_explain import GIB, PLAN

QUICKSTART = Path(__file__).parents[3] / "examples" / "quickstart.yaml"
TARGET = Target(tokens=1e12, tokens_from="--tokens", tokens_per_step=1000, price=2.0)


def of(*values: str, plan: Plan = PLAN, priced: bool = False) -> Compared:
    decision = decide(plan, TARGET) if priced else None
    return Compared(values=values, plan=plan, decision=decision)


def test_a_row_has_time_memory_and_what_changed() -> None:
    assert PLAN.time is not None
    slower = replace(
        PLAN,
        memory=replace(PLAN.needs, items={"parameters": 10 * GIB, "activations": 12 * GIB}),
        time=replace(PLAN.time, step_s=3.0, parts={"compute": 1.5, "communication": 1.5}),
    )
    head, first, range_of_first, second, *why = describe_compared(
        [of("a=1", "b=x"), of("a=1", "b=y", plan=slower)]
    ).splitlines()
    # No money without a price, and no time to finish without a number of tokens.
    assert head.split() == ["a", "b", "mesh", "step", "change", "MFU", "memory"]
    assert first.split() == ["1", "x", "shard2", "tp2", "2.00", "s", "40.0%", "50%"]
    assert range_of_first.strip() == "3,900 to 4,500 tokens/s per device"
    assert second.split()[:7] == ["1", "y", "shard2", "tp2", "3.00", "s", "+50.0%"]
    assert " ".join(why).split("device; ")[1] == "communication +1.00 s; activations -8 GiB"


def test_time_to_finish_and_money_have_columns_where_known() -> None:
    head, row, *_ = describe_compared([of("a=1", priced=True)]).splitlines()
    assert head.endswith("to finish  GPU-hours    money")
    assert row.endswith("days     67,817  135,634")
    (body,) = compared_json([of("a=1", priced=True)])["plans"]
    assert body["plan"]["decision"]["money"] == pytest.approx(135_633.7, rel=1e-4)


def test_a_refused_value_is_a_row_with_its_reason() -> None:
    refused = Compared(values=("parallel.tp=3",), plan=None, refusal="tp must divide 8")
    shown = describe_compared([of("parallel.tp=2"), refused]).splitlines()
    assert [line.strip() for line in shown[-2:]] == ["3   refused", "tp must divide 8"]
    assert compared_json([refused])["plans"] == [
        {"set": "parallel.tp=3", "plan": None, "refusal": "tp must divide 8"}
    ]
    assert describe_compared([refused]).splitlines()[0].split() == ["tp", "mesh"]
    both = replace(refused, values=("parallel.tp=3", "other.tp=1"))
    assert describe_compared([both]).split()[:2] == ["parallel.tp", "other.tp"]


def test_a_refusal_for_memory_is_one_reason() -> None:
    lines = ["no plan for x on 1 host x 8 ranks:", "  memory: 139 GiB", "  pp=1: need 139 GiB"]
    refused = Compared(values=("a=1",), plan=None, refusal="\n".join(lines))
    assert describe_compared([refused]).splitlines()[2:] == ["      memory: 139 GiB"]


def compared(*items: str) -> list[Compared]:
    return compare_plans(QUICKSTART, ["parallel={}"], {}, None, items, Wish())


def test_values_that_no_spec_can_have_are_rows_too() -> None:
    shown = describe_compared(compared("parallel.tp=2,3,many"))
    assert "parallel.tp=3: must divide the 2 ranks of a host" in shown
    assert "--compare parallel.tp: must be" in shown
    assert "got 'many'" in shown
    assert all(len(line) <= WIDTH for line in shown.splitlines())


def test_a_spec_that_is_invalid_with_every_value_is_an_error() -> None:
    with pytest.raises(SpecError, match=r"did you mean cluster\.hosts"):
        compared("cluster.host=1,2")
    with pytest.raises(SpecError) as caught:
        compared("train.steps=x,0", "parallel.tp=y")
    said = str(caught.value)
    assert said.startswith(f"{QUICKSTART} has 3 problems\n")
    for place in ("--compare train.steps: must be a whole", "--compare train.steps: must be at"):
        assert said.count(place) == 1
    assert said.count("--compare parallel.tp: must be") == 1  # in both combinations
