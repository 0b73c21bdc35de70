"""`ndctl snapshot`, `profile`, `exec`: ranks of a job and their hosts; `report`: its story."""

import os
from typing import TYPE_CHECKING

import click

from orchestrator.cli.options import (
    FiniteRange,
    find,
    job_argument,
    json_option,
    place_options,
    print_as,
    root_option,
    say,
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
    from orchestrator.app.ranks.stacks import describe_stacks, rank_stacks, stacks_json
    from orchestrator.system import SystemClock

    taken = rank_stacks(find(job, run_root, place), os.environ, SystemClock())
    print_as(as_json, taken, stacks_json, describe_stacks)


def _ranks(ctx: click.Context, param: click.Parameter, text: str) -> tuple[int, ...]:
    try:
        ranks = {int(part) for part in text.split(",")}
    except ValueError:
        ranks = {-1}
    if min(ranks) < 0:
        raise click.BadParameter(f"{text!r} is no list of ranks, such as 0,5")
    return tuple(sorted(ranks))


@click.command(epilog="Example: ndctl profile quickstart --ranks 0,1 --steps 3")
@job_argument
@click.option("--ranks", default="0", callback=_ranks, help="Ranks to profile, such as 0,5. [0]")
@click.option("--steps", type=click.IntRange(1, 100), default=3, help="Steps to record. [3]")
@click.option(
    "--timeout",
    type=FiniteRange(min=1.0),
    default=600.0,
    metavar="SECONDS",
    help="Limit for the ranks to do their steps. [600]",
)
@root_option
@place_options
@json_option
def profile(  # noqa: PLR0913 - an option each
    job: str,
    ranks: tuple[int, ...],
    steps: int,
    timeout: float,
    run_root: str | None,
    place: "Place | None",
    as_json: bool,
) -> None:
    """Record the next steps of some ranks of a running job with torch.profiler.

    The job goes on, more slowly while it is recorded. The files are written to its run directory.
    """
    from orchestrator.app.ranks.profiles import describe_profiles, profiles_json, rank_profiles
    from orchestrator.contract.messages.agent_protocol import ProfileWish
    from orchestrator.system import SystemClock

    wish = ProfileWish(ranks=ranks, steps=steps, wait_s=timeout)
    taken = rank_profiles(find(job, run_root, place), os.environ, SystemClock(), wish)
    print_as(as_json, taken, profiles_json, describe_profiles)


@click.command("exec", epilog="Example: ndctl exec big-run --host node17 -- nvidia-smi -L")
@job_argument
@click.option("--host", metavar="H", help="A host of the job. [the only one]")
@root_option
@place_options
@click.argument("words", metavar="-- CMD [ARGS]", nargs=-1, type=click.UNPROCESSED, required=True)
def exec_(
    job: str,
    host: str | None,
    run_root: str | None,
    place: "Place | None",
    words: tuple[str, ...],
) -> None:
    """Run a command on a host of a running job, beside its ranks, and exit with its exit code.

    The command shares the devices of the ranks, and has NDCTL_RUN_DIR and NDCTL_HOST. On Slurm it
    is a step of the job (srun --overlap), which only the job's user may add; on Kubernetes it runs
    in the pod, for which you need the right to create pods/exec, and has no terminal.
    """
    import sys

    from orchestrator.app.ranks.exec_on_host import exec_on_host
    from orchestrator.system import SystemClock

    sys.exit(exec_on_host(find(job, run_root, place), host, words, os.environ, SystemClock()))


@click.command(epilog="Example: ndctl report quickstart --html report.html --price 2.5")
@job_argument
@click.option("--incident", "only", type=int, metavar="N", help="Only this incident.  [all]")
@click.option("--html", "page", metavar="FILE", help="Write one HTML file with charts.")
@click.option("--md", "text_file", metavar="FILE", help="Write Markdown.  [print it]")
@click.option(
    "--price",
    type=FiniteRange(min=0),
    metavar="PRICE",
    help="Price of a GPU for an hour, in any currency. [inventory, or your configuration]",
)
@root_option
@place_options
def report(  # noqa: PLR0913 - an option each
    job: str,
    only: int | None,
    page: str | None,
    text_file: str | None,
    price: float | None,
    run_root: str | None,
    place: "Place | None",
) -> None:
    """Tell the story of a job's incidents for a post-mortem: timeline, evidence, decision, cost."""
    from pathlib import Path

    from orchestrator.app.fleet.report import make_report, write_report
    from orchestrator.dashboard.report.html import html_report
    from orchestrator.dashboard.report.markdown import markdown_report
    from orchestrator.dashboard.report.story import summary
    from orchestrator.system import SystemClock

    if (
        page is not None
        and text_file is not None
        and Path(page).resolve() == Path(text_file).resolve()
    ):
        raise click.UsageError(f"--html and --md name the same file, {page}; give two names")
    made = make_report(find(job, run_root, place), only, price, os.environ, SystemClock())
    if page is None and text_file is None:
        say(markdown_report(made).rstrip())
        return
    for file, write in ((page, html_report), (text_file, markdown_report)):
        if file is not None:
            size = write_report(Path(file), write(made))
            say(f"wrote {file} ({size / 1024:,.0f} KiB)")
    say(summary(made))
