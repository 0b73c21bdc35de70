"""The command that measures the hosts at hand: `calibrate`."""

import os

import click

from orchestrator.cli.options import json_option, print_json, say

DEFAULT_S, LEAST_S, MOST_S = 90.0, 5.0, 150.0


@click.command(epilog="Example: ndctl calibrate --ranks 4 --write here.yaml")
@click.option("--write", "file", metavar="FILE", help="Write a hardware profile, a .yaml file.")
@click.option(
    "--ranks",
    type=click.IntRange(1, 64),
    metavar="N",
    help="Ranks on this host, as many as a job has. [its GPUs; 1 without a GPU]",
)
@click.option(
    "--budget",
    type=click.FloatRange(LEAST_S, MOST_S),
    default=DEFAULT_S,
    show_default=True,
    metavar="SECONDS",
    help="Time for all measurements together.",
)
@json_option
def calibrate(file: str | None, ranks: int | None, budget: float, as_json: bool) -> None:
    """Measure products, attention, copies and collectives of the hosts at hand.

    On Slurm, `srun --ntasks-per-node=1 ndctl calibrate` measures all nodes of the allocation, and
    the links between them. `ndctl plan SPEC --inventory FILE` plans with the written profile.
    """
    from pathlib import Path

    from orchestrator.app import calibrations
    from orchestrator.calibrate.show import calibrated_json, describe_measurements
    from orchestrator.system import SystemClock, run_command

    hosts = calibrations.hosts_at_hand(os.environ)
    found = calibrations.measure(
        hosts, calibrations.ranks_here(os.environ, ranks), budget, run_command
    )
    if found is None:
        return  # the first host has the numbers of all
    made = calibrations.calibrated(found, os.uname().nodename, SystemClock())
    if file is not None:
        calibrations.write(made, Path(file))
    if as_json:
        print_json(calibrated_json(found, made.profile, made.notes, file))
        return
    say(describe_measurements(found))
    for note in made.notes:
        say(f"note: {note}")
    if file is not None:
        say(f"wrote {file}; next: ndctl plan SPEC --inventory {file}")
