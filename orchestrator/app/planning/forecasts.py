"""`ndctl forecast`."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from orchestrator.app.planning.plans import Planned, inventory_at, plan_spec
from orchestrator.errors import PlanError
from orchestrator.forecast.monte_carlo import Forecast, forecast
from orchestrator.forecast.rates import Rates, rates_of
from orchestrator.forecast.settings import Assumptions, Basis, basis_of
from orchestrator.inventory.file import EXAMPLE
from orchestrator.load import of_the_trainer


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
    """Raises the errors of `plan_spec`, and PlanError if the step time cannot be predicted."""
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
    found = forecast(basis.setting, asked.histories, asked.seed, basis.step_s)
    return Told(found=found, basis=basis, rates=rates)


def hosts_there(planned: Planned, environ: Mapping[str, str], inventory: Path | None) -> int | None:
    """Number of hosts that the job can use; None if the hosts are processes on this machine, or
    known only from the spec."""
    from orchestrator.inventory.described import described_device

    cluster = planned.spec.cluster
    if inventory is None and (cluster.backend == "local" or described_device(cluster)):
        return None
    seen = inventory_at(inventory, environ, cluster.backend).inventory
    return max(1, len(seen.with_devices(planned.plan.ranks_per_host)))
