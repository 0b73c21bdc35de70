"""Comparison of plans in a table."""

from msgspec.structs import replace

from orchestrator.plan.show.compare import Compared, compared_json, describe_compared
from tests.plan.show.test_explain import PLAN


def test_an_item_of_only_one_plan_keeps_its_place_in_the_table() -> None:
    memory = replace(PLAN.needs, items={"parameters": 1, "boundaries": 2, "activations": 3})
    plans = [PLAN, replace(PLAN, memory=memory)]
    told = describe_compared([Compared(values=f"a={n}", plan=plan) for n, plan in enumerate(plans)])
    rows = [line.split()[:2] for line in told.splitlines() if line.startswith("    of ")]
    assert rows == [["of", "parameters"], ["of", "boundaries"], ["of", "activations"]]


def test_bytes_are_summed_by_link() -> None:
    (one,) = PLAN.communication
    sent = (
        replace(one, level="leaf", by_level={"host": 3_000_000_000, "leaf": 1_000_000_000}),
        replace(one, by_level={"host": 500_000_000, "leaf": 0}),
    )
    told = describe_compared([Compared(values="a=1", plan=replace(PLAN, communication=sent))])
    lines = {line.rsplit("  ", 1)[0].strip(): line.rsplit("  ", 1)[1] for line in told.splitlines()}
    assert lines["sent over host links"] == "3.50 GB"
    assert lines["sent over leaf links"] == "1.00 GB"


def test_a_refusal_has_its_reason() -> None:
    refused = Compared(values="parallel.tp=3", plan=None, refusal="tp must divide 8")
    assert describe_compared([refused]) == "parallel.tp=3  tp must divide 8"
    assert compared_json([refused])["plans"] == [
        {"set": "parallel.tp=3", "plan": None, "refusal": "tp must divide 8"}
    ]
