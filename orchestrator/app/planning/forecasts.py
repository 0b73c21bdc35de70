"""`ndctl forecast`."""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from orchestrator.app.planning.plans import Planned, inventory_at, plan_spec
from orchestrator.errors import PlanError, SpecError
from orchestrator.forecast.monte_carlo import Forecast, forecast
from orchestrator.forecast.rates import Rates, rates_of
from orchestrator.forecast.setting import Setting
from orchestrator.forecast.settings import Assumptions, Basis, basis_of
from orchestrator.inventory.file import EXAMPLE
from orchestrator.load import of_the_trainer

MOST_FAILURES = 1_000_000
"""In all histories together. The simulation of so many takes about a minute."""
MOST_IN_REPAIR = 100_000
"""Hosts under repair at a time, on average. The closed form for so many takes about a minute."""
SENSIBLE = 0.01
"""Days and hours below this are no advice."""


class Asked(Struct, frozen=True, kw_only=True):
    """Options of the command. None: computed from the plan, or a default."""

    days: float
    rates: str
    mtbf_h: float | None = None
    """Mean time between failures of one host, hours."""
    storage_gb_per_s: float | None = None
    stall_s: float | None = None
    restart_s: float | None = None
    repair_h: float
    queue_s: float
    histories: int
    seed: int


class Told(Struct, frozen=True, kw_only=True):
    found: Forecast
    basis: Basis
    rates: Rates


def forecast_spec(
    path: Path,
    overrides: Sequence[str],
    environ: Mapping[str, str],
    inventory: Path | None,
    asked: Asked,
) -> Told:
    """
    Raises:
        PlanError: the step time cannot be predicted, and the errors of `plan_spec`.
        SpecError: the forecast would take many minutes.
    """
    planned = plan_spec(path, overrides, environ, inventory)
    if planned.plan.time is None:
        raise PlanError(
            "the step time is unknown: these hosts have no hardware profile",
            fix=f"give --inventory FILE with a profile; it can be as short as {EXAMPLE}",
        )
    rates = rates_of(asked.rates)
    if asked.mtbf_h is not None:
        rates = rates.with_mtbf(asked.mtbf_h)  # given for a whole host, so not scaled to devices
    else:
        rates = rates.for_devices(planned.plan.ranks_per_host)
    storage = asked.storage_gb_per_s
    around = Assumptions(
        rates=rates,
        days=asked.days,
        storage_bytes_per_s=None if storage is None else storage * 1e9,
        stall_s=asked.stall_s,
        restart_s=asked.restart_s,
        repair_h=asked.repair_h,
        queue_s=asked.queue_s,
        hosts_there=hosts_there(planned, environ, inventory),
    )
    basis = basis_of(of_the_trainer(planned.spec, "forecast"), planned.plan, around)
    if problems := list(_too_long(basis.setting, asked)):
        raise SpecError(
            "; ".join(message for message, _ in problems), fix="; ".join(fix for _, fix in problems)
        )
    found = forecast(basis.setting, asked.histories, asked.seed, basis.step_s)
    return Told(found=found, basis=basis, rates=rates)


def _too_long(setting: Setting, asked: Asked) -> Iterator[tuple[str, str]]:
    """What makes the forecast take many minutes, each with its fix."""
    failures = setting.horizon_s * sum(one.per_s for one in setting.hazards) * asked.histories
    if failures > MOST_FAILURES:
        days = _at_most("--days", asked.days * MOST_FAILURES / failures)
        yield (
            f"{asked.histories:,} histories of {asked.days:g} days have about {failures:.2g}"
            f" failures; ndctl simulates at most {MOST_FAILURES:,}",
            f"give {days}fewer --histories, or a longer --mtbf",
        )
    in_repair = setting.leaving_per_s * setting.repair_s
    if in_repair > MOST_IN_REPAIR:
        hours = _at_most("--repair", asked.repair_h * MOST_IN_REPAIR / in_repair)
        yield (
            f"with --repair {asked.repair_h:g} about {in_repair:.2g} hosts are under repair at a"
            f" time; ndctl forecasts with at most {MOST_IN_REPAIR:,}",
            f"give {hours}a longer --mtbf",
        )


def _at_most(option: str, number: float) -> str:
    """The beginning of an advice: `number` with two digits, rounded down; empty if tiny."""
    if number < SENSIBLE:
        return ""
    unit = 10.0 ** (math.floor(math.log10(number)) - 1)
    return f"{option} {math.floor(number / unit) * unit:.2g} or less, or "


def hosts_there(planned: Planned, environ: Mapping[str, str], inventory: Path | None) -> int | None:
    """Number of hosts that the job can use; None if the hosts are processes on this machine, or
    known only from the spec."""
    from orchestrator.inventory.described import described_device

    cluster = planned.spec.cluster
    if inventory is None and (cluster.backend == "local" or described_device(cluster)):
        return None
    seen = inventory_at(inventory, environ, cluster.backend).inventory
    return max(1, len(seen.with_devices(planned.plan.ranks_per_host)))
