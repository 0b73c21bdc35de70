"""`ndctl forecast`: the expected training time of a job over weeks."""

import os

import click

from orchestrator.cli.options import (
    FiniteRange,
    inventory_option,
    json_option,
    print_json,
    say,
    set_option,
    spec_files,
)

ABOVE_0 = FiniteRange(min=0, min_open=True)


@click.command(
    epilog="Example: ndctl forecast examples/llama3-405b.yaml"
    " --inventory examples/inventories/h100.yaml --days 54"
)
@spec_files
@set_option
@json_option
@inventory_option
@click.option("--days", type=ABOVE_0, default=90.0, help="Days to simulate. [90]")
@click.option(
    "--rates",
    metavar="NAME|FILE",
    default="llama3",
    help="Failure rates of hosts: llama3, rsc-1, rsc-2, or a .yaml file. [llama3]",
)
@click.option(
    "--mtbf",
    type=ABOVE_0,
    metavar="HOURS",
    help="Mean time between failures of one host. [from --rates]",
)
@click.option(
    "--storage",
    type=ABOVE_0,
    metavar="GB/S",
    help="Write bandwidth of the storage for all hosts together. [1 per host]",
)
@click.option(
    "--stall",
    type=FiniteRange(min=0),
    metavar="SECONDS",
    help="Time that a save stops training. [computed]",
)
@click.option(
    "--restart",
    type=ABOVE_0,
    metavar="SECONDS",
    help="Time from a failure to the next step. [120 + loading]",
)
@click.option(
    "--repair",
    type=ABOVE_0,
    default=24.0,
    metavar="HOURS",
    help="Time until a broken host is repaired. [24]",
)
@click.option(
    "--queue",
    type=ABOVE_0,
    default=600.0,
    metavar="SECONDS",
    help="Time to wait for another host. [600]",
)
@click.option(
    "--histories",
    type=click.IntRange(min=2),
    default=40,
    help="Number of simulated histories. [40]",
)
@click.option("--seed", type=int, default=0, help="Seed of the first history. [0]")
def forecast(  # noqa: PLR0913 - click hands over one argument for each option
    spec: str,
    overrides: tuple[str, ...],
    as_json: bool,
    inventory: str | None,
    days: float,
    rates: str,
    mtbf: float | None,
    storage: float | None,
    stall: float | None,
    restart: float | None,
    repair: float,
    queue: float,
    histories: int,
    seed: int,
) -> None:
    """Predict how much of its time a job trains, what takes the rest, and the best settings."""
    from pathlib import Path

    from orchestrator.app.planning.forecasts import Asked, forecast_spec
    from orchestrator.forecast.show import describe_forecast, forecast_json

    asked = Asked(
        days=days,
        rates=rates,
        mtbf_h=mtbf,
        storage_gb_per_s=storage,
        stall_s=stall,
        restart_s=restart,
        repair_h=repair,
        queue_s=queue,
        histories=histories,
        seed=seed,
    )
    hosts = None if inventory is None else Path(inventory)
    told = forecast_spec(Path(spec), overrides, os.environ, hosts, asked)
    if as_json:
        print_json(forecast_json(told.found, told.basis, told.rates))
    else:
        say(describe_forecast(told.found, told.basis, told.rates))
