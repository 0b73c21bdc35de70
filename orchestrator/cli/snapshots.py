"""`ndctl snapshot`: where the ranks of a running job are."""

import os
from typing import TYPE_CHECKING

import click

from orchestrator.cli.options import (
    find,
    job_argument,
    json_option,
    place_options,
    print_as,
    root_option,
)

if TYPE_CHECKING:
    from orchestrator.app.remote import Place


@click.command(epilog="Example: ndctl snapshot quickstart")
@job_argument
@root_option
@place_options
@json_option
def snapshot(job: str, run_root: str | None, place: "Place | None", as_json: bool) -> None:
    """Show where the ranks of a running job are now: their steps and stacks.

    The ranks go on. Their whole stacks are in files that are named at the end.
    """
    from orchestrator.app.rank_stacks import describe_stacks, rank_stacks, stacks_json

    taken = rank_stacks(find(job, run_root, place), os.environ)
    print_as(as_json, taken, stacks_json, describe_stacks)
