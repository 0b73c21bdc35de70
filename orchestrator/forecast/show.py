"""A forecast, for people and as JSON."""

from typing import Any

from orchestrator.contract.codec import encode
from orchestrator.forecast import closed_form
from orchestrator.forecast.monte_carlo import Expected, Forecast
from orchestrator.forecast.rates import Rates
from orchestrator.forecast.setting import PARTS
from orchestrator.forecast.settings import Basis
from orchestrator.plan.figures import show_bytes, show_seconds
from orchestrator.plan.show.tables import table, wrapped

INDENT = " " * 11
SEEN = 0.01
"""Smallest share of time that gets a remark."""


def describe_forecast(found: Forecast, basis: Basis, rates: Rates) -> str:
    said, setting = found.expected, basis.setting
    days = setting.horizon_s / 86400
    hosts = "1 host" if setting.hosts == 1 else f"{setting.hosts:,} hosts"
    devices = f"{hosts}, {setting.spares} spare, {setting.reserve:,} more free"
    lines = [
        f"job        {devices}; {days:g} days",
        *_lacking(basis),
        f"failures   one every {_time(setting.mtbf_s)} on average"
        f" ({_many(rates.per_1000_host_days)} per 1,000 host-days)",
        *wrapped(rates.source, INDENT, INDENT),
        f"checkpoint {show_bytes(basis.checkpoint_bytes)} in {show_seconds(setting.write_s)},"
        f" {_stall(setting.stalled_s)}",
        *_memory(basis),
        "",
        f"effective  {_share(said.effective)} of the time is training, with the spec's checkpoint"
        f" every {_steps(said, basis)}",
        f"{INDENT}{_share(said.low)} to {_share(said.high)} in 90 % of the simulations; closed form"
        f" {_share(said.closed)}",
        f"{INDENT}{_many(said.failures)} failures on average ({said.fewest:,} to {said.most:,});"
        f" times without a free spare: {_many(said.waits)}",
        f"best       {_share(found.best.effective)} with a checkpoint every"
        f" {_steps(found.best, basis)} and {found.best.setting.spares} spare"
        f" host{'' if found.best.setting.spares == 1 else 's'}",
        *_held(found),
        *_too_few(basis),
        "",
        *_parts(found),
        "",
        *_around(found, basis),
        "",
        "assumptions",
        *(
            line
            for name, words in basis.notes.items()
            for line in wrapped(words, f"  {name:9}", INDENT)
        ),
        *wrapped(
            f"{found.histories} simulations from seed {found.seed} on; failures are independent of"
            " each other",
            "  ",
            "  ",
        ),
    ]
    return "\n".join(lines)


def _lacking(basis: Basis) -> list[str]:
    asked, there = basis.spares_asked, basis.setting.spares
    return [f"{INDENT}{asked} spare hosts requested, {there} available"] if there < asked else []


def _stall(seconds: float) -> str:
    if not seconds:
        return "written from the memory checkpoint of the same step"
    return f"training stalls for {show_seconds(seconds)}"


def _memory(basis: Basis) -> list[str]:
    memory = basis.setting.memory
    if memory is None:
        return []
    steps = round(memory.interval_s / basis.step_s)
    covered = sum(hazard.per_s for hazard in basis.setting.unplanned if hazard.covered)
    words = (
        f"a copy every {steps:,} step{'' if steps == 1 else 's'} stalls training for"
        f" {show_seconds(memory.stall_s)}, and a failure costs"
        f" {show_seconds(memory.interval_s / 2 + memory.lag_s)} of it on average;"
        f" {covered * basis.setting.mtbf_s:.0%} of the failures resume from it"
    )
    return wrapped(words, "memory     ", INDENT)


def _held(found: Forecast) -> list[str]:
    """Why the best setting is the best, if its number of spares differs from the spec's."""
    said, best = found.expected, found.best
    if said.setting.spares == best.setting.spares:
        return []
    words = f"share of the time of all hosts, spares included: {best.worth:.2%}, with the spec"
    return wrapped(f"{words} {said.worth:.2%}", INDENT, INDENT)


def _too_few(basis: Basis) -> list[str]:
    setting = basis.setting
    bare = closed_form.bare(setting)
    if bare < SEEN:
        return []
    gone = setting.leaving_per_s * setting.repair_s
    beside = setting.spares + setting.reserve
    is_ = "is" if beside == 1 else "are"
    words = (
        f"{_many(gone)} hosts are in repair on average, and {beside} {is_} free beyond the job's"
        f" own: in the long run too few are left {bare:.1%} of the time; plan for fewer"
        " (--set cluster.hosts=N), or add hosts"
    )
    return wrapped(words, "too few    ", INDENT)


def _parts(found: Forecast) -> list[str]:
    said, best = found.expected, found.best
    rows = [(part, f"{said.parts[part]:.2%}", f"{best.parts[part]:.2%}") for part in PARTS]
    return table(("where the time goes", "spec", "best"), rows)


def _around(found: Forecast, basis: Basis) -> list[str]:
    rows = [
        (
            _steps(one, basis) + ("  best" if one.setting == found.best.setting else ""),
            f"{one.effective:.2%}",
            f"{one.closed:.2%}",
        )
        for one in found.around
    ]
    spares = found.best.setting.spares
    head = (f"checkpoint every ({spares} spares)", "simulated", "closed form")
    return [*table(head, rows), *_apart(found)]


def _apart(found: Forecast) -> list[str]:
    most = max(abs(one.effective - one.closed) for one in (found.expected, *found.around))
    if most < SEEN:
        return []
    words = (
        f"the two differ by up to {most:.1%}; the simulations decide. The closed form describes the"
        " long run and is approximate where hosts wait in the queue while few are free; with few"
        " simulations chance matters"
    )
    return wrapped(words, "  ", "  ")


def _steps(one: Expected, basis: Basis) -> str:
    steps = round(one.setting.interval_s / basis.step_s)
    return f"{steps:,} step{'' if steps == 1 else 's'} ({_time(one.setting.interval_s)})"


def _share(share: float) -> str:
    """Never rounded up to 100 %, beside lost time."""
    return f"{share:.1%}" if share < 0.9995 or share == 1 else f"{min(share, 0.9999):.2%}"


def _many(count: float) -> str:
    return f"{count:,.0f}" if count >= 100 else f"{count:.3g}"


def _time(seconds: float) -> str:
    if seconds < 120:
        return show_seconds(seconds)
    if seconds < 7200:
        return f"{seconds / 60:.3g} min"
    return f"{seconds / 3600:.3g} h" if seconds < 100 * 3600 else f"{_many(seconds / 86400)} days"


def forecast_json(found: Forecast, basis: Basis, rates: Rates) -> dict[str, Any]:
    def expected(one: Expected) -> dict[str, Any]:
        return {
            "every_steps": round(one.setting.interval_s / basis.step_s),
            "interval_s": one.setting.interval_s,
            "spares": one.setting.spares,
            "effective": one.effective,
            "of_all_held": one.worth,
            "low": one.low,
            "high": one.high,
            "closed_form": one.closed,
            "parts": one.parts,
            "failures": one.failures,
            "waits": one.waits,
        }

    return {
        "setting": encode(basis.setting),
        "spares_asked": basis.spares_asked,
        "mtbf_s": basis.setting.mtbf_s,
        "per_1000_host_days": rates.per_1000_host_days,
        "source": rates.source,
        "step_s": basis.step_s,
        "checkpoint_bytes": basis.checkpoint_bytes,
        "expected": expected(found.expected),
        "best": expected(found.best),
        "around": [expected(one) for one in found.around],
        "taken_for_granted": dict(basis.notes),
        "histories": found.histories,
        "seed": found.seed,
    }
