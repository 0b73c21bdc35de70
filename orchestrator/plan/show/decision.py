"""What a job takes until it is done, for people and for scripts."""

from collections.abc import Callable
from typing import Any

from orchestrator.plan.decision import Decision, Estimate
from orchestrator.plan.figures import show_amount, show_duration, show_durations, show_energy
from orchestrator.plan.show.tables import labelled, table, wrapped


def describe_decision(decision: Decision) -> list[str]:
    """Lines: a row for each of tokens a day, time, GPU-hours, money and energy."""
    return [
        *labelled("to finish", headline(decision)),
        *table(["", "expected", "9 of 10 runs"], estimates(decision)),
        *([line for said in basis_of(decision) for line in wrapped(said, "  ", "    ")]),
    ]


def estimates(decision: Decision) -> list[list[str]]:
    """For each number its name, its expected value and its range."""
    rows = [
        _row("tokens a day", decision.tokens_per_day, show_amount),
        _time("time", decision.training_s),
    ]
    if decision.with_failures_s is not None:
        rows.append(_time("time with failures", decision.with_failures_s))
    for label, found, show in (
        ("GPU-hours", decision.gpu_hours, show_amount),
        ("money", decision.money, show_amount),
        ("energy", decision.energy_kwh, show_energy),
    ):
        if found is not None:
            rows.append(_row(label, found, show))
    return rows


def headline(decision: Decision) -> str:
    """Such as `58 days, 61 days with failures: train.steps=1,000, 524M tokens`."""
    target, lossy = decision.target, decision.with_failures_s
    time = show_duration(decision.training_s.expected)
    longer = time if lossy is None else show_duration(lossy.expected)
    more = "" if longer == time else f", {longer} with failures"
    return f"{time}{more}: {target.tokens_from}, {show_amount(target.tokens)} tokens"


def _time(label: str, found: Estimate) -> list[str]:
    spread = "" if found.range is None else show_durations(*found.range)
    return [label, show_duration(found.expected), spread]


def _row(label: str, found: Estimate, show: Callable[[float], str]) -> list[str]:
    spread = "" if found.range is None else " to ".join(map(show, found.range))
    return [label, show(found.expected), spread]


def basis_of(decision: Decision) -> list[str]:
    """What the rows rest on."""
    target = decision.target
    said = []
    if target.effective == 0:
        said.append(
            f"failures: the job would never finish {target.effective_from}, because its checkpoints"
            " are too rare (see ndctl forecast)"
        )
    elif target.effective is not None:
        said.append(
            f"failures: {target.effective:.1%} of the time is training {target.effective_from}"
            " (see ndctl forecast)"
        )
    if target.spare_hosts:
        hosts = f"{target.spare_hosts} spare host{'s' if target.spare_hosts > 1 else ''}"
        said.append(f"GPU-hours: with {hosts}")
    if decision.gpu_hours is None:
        return said
    if decision.price is None:
        said.append("money: no price (--price, or price_per_gpu_hour in the inventory)")
    else:
        said.append(f"money: {decision.price:,.4g} per GPU-hour ({decision.price_from})")
    if decision.device_power_w is None:
        said.append("energy: the power of the devices is unknown (power_w in their profile)")
    else:
        said.append(
            f"energy: at most {decision.device_power_w} W for each GPU board in use, without"
            " hosts, network and cooling"
        )
    return said


def decision_json(decision: Decision) -> dict[str, Any]:
    """`decision` as `ndctl plan --json` prints it; a range is [low, high]."""
    target = decision.target
    return {
        "tokens": target.tokens,
        "tokens_from": target.tokens_from,
        "steps": decision.steps,
        **_estimate("tokens_per_day", decision.tokens_per_day),
        **_estimate("training_s", decision.training_s),
        "effective": target.effective,
        "effective_from": target.effective_from or None,
        **_estimate("with_failures_s", decision.with_failures_s),
        "spare_hosts": target.spare_hosts,
        **_estimate("gpu_hours", decision.gpu_hours),
        "price_per_gpu_hour": decision.price,
        "price_from": decision.price_from if decision.price is not None else None,
        **_estimate("money", decision.money),
        "device_power_w": decision.device_power_w,
        **_estimate("energy_kwh", decision.energy_kwh),
    }


def _estimate(name: str, found: Estimate | None) -> dict[str, Any]:
    if found is None:
        return {name: None, f"{name}_range": None}
    return {name: found.expected, f"{name}_range": found.range and list(found.range)}
