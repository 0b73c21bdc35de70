"""Weeks ahead: `forecast`."""

import os

import click

from orchestrator.cli.options import (
    FiniteRange,
    inventory_option,
    json_option,
    print_json,
    say,
    set_option,
    spec_argument,
)

ABOVE_0 = FiniteRange(min=0, min_open=True)


@click.command(
    epilog="Example: ndctl forecast examples/llama3-405b.yaml"
    " --inventory examples/inventories/h100.yaml --days 54"
)
@spec_argument
@set_option
@json_option
@inventory_option
@click.option("--days", type=ABOVE_0, default=90.0, help="How far to look ahead. [90]")
@click.option(
    "--rates",
    metavar="NAME|FILE",
    default="llama3",
    help="How often hosts break: llama3, rsc-1, rsc-2, or a .yaml of your own. [llama3]",
)
@click.option(
    "--mtbf", type=ABOVE_0, metavar="HOURS", help="Of one host, between failures. [the rates']"
)
@click.option(
    "--storage", type=ABOVE_0, metavar="GB/S", help="That it takes of all hosts. [1 for each]"
)
@click.option(
    "--stall",
    type=FiniteRange(min=0),
    metavar="SECONDS",
    help="That training stands still for a save. [reckoned]",
)
@click.option(
    "--restart", type=ABOVE_0, metavar="SECONDS", help="To the next step. [120 and loading]"
)
@click.option(
    "--repair", type=ABOVE_0, default=24.0, metavar="HOURS", help="That a host is gone. [24]"
)
@click.option(
    "--queue", type=ABOVE_0, default=600.0, metavar="SECONDS", help="For another host. [600]"
)
@click.option("--histories", type=click.IntRange(min=2), default=40, help="To draw. [40]")
@click.option("--seed", type=int, default=0, help="Of the first history. [0]")
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
    """Show how much of its time a job will train, where the rest goes, and what would be best."""
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
