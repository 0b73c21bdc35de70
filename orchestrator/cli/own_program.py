"""`ndctl run`: the user's own program as a job, without a spec."""

import os
from typing import TYPE_CHECKING

import click

from orchestrator.cli.launch import drill_option, submit_one
from orchestrator.cli.options import (
    backend_option,
    root_option,
    say,
    set_option,
    warn_of_settings,
)

if TYPE_CHECKING:
    from orchestrator.contract.drills import Drill


@click.command(
    context_settings={"ignore_unknown_options": False},
    epilog="Example: ndctl run --hosts 2 --gpus-per-host 8 --follow -- train.py --lr 3e-4",
)
@click.option("--name", help="Name of the job. [the program's, with a number if it is taken]")
@backend_option
@click.option("--hosts", type=click.IntRange(min=1), metavar="H", help="Number of hosts.  [1]")
@click.option(
    "--gpus-per-host",
    type=click.IntRange(min=1),
    metavar="G",
    help="Ranks per host. [all GPUs of this machine, or 1]",
)
@click.option(
    "--spare-hosts", type=click.IntRange(min=0), metavar="S", help="Hosts that replace lost ones."
)
@click.option(
    "--follow", is_flag=True, help="Wait and show progress. Exit 0 only if the job succeeds."
)
@root_option
@set_option
@drill_option
@click.argument("words", metavar="-- PROGRAM [ARGS]", nargs=-1, type=click.UNPROCESSED)
def run(  # noqa: PLR0913 - click hands over one argument for each option
    name: str | None,
    on_backend: tuple[str, ...],
    hosts: int | None,
    gpus_per_host: int | None,
    spare_hosts: int | None,
    follow: bool,
    run_root: str | None,
    overrides: tuple[str, ...],
    drills: "tuple[Drill, ...]",
    words: tuple[str, ...],
) -> None:
    """Run your own program on each rank, as torchrun does, and supervise it.

    PROGRAM is a script (train.py), -m MODULE, or --no-python EXECUTABLE. It is the same as `ndctl
    submit` of a spec with `run:`.
    """
    from pathlib import Path

    from orchestrator.app.planning.plans import plan_written
    from orchestrator.app.submission.own_program import Asked, refuse_launcher, write
    from orchestrator.app.submission.payload import Submission
    from orchestrator.job_paths import run_root_of

    if not words:
        raise click.UsageError("name your program after --, for example: ndctl run -- train.py")
    refuse_launcher(words)
    asked = Asked(
        words=words,
        name=name,
        hosts=hosts,
        gpus_per_host=gpus_per_host,
        spare_hosts=spare_hosts,
        overrides=(*overrides, *on_backend),
    )
    _note_own_options(words)
    written = write(asked, run_root, os.environ)
    planned = plan_written(
        written, os.environ, run_root=None if run_root is None else Path(run_root)
    )
    warn_of_settings(planned.spec)
    root = run_root_of(run_root, os.environ, planned.spec.run_root)
    submit_one(Submission(planned=planned, run_root=root, drills=drills), follow=follow)


OWN = ("--hosts", "--gpus-per-host", "--spare-hosts", "--follow", "--drill")
"""Options that few programs have, and that many people write after the program."""


def _note_own_options(words: tuple[str, ...]) -> None:
    for one in words[1:]:
        if one.partition("=")[0] in OWN:
            text = f"note: {one} is an argument of {words[0]}: options of ndctl run come before --"
            say(text, err=True)
