"""Jobs begin: `submit`, `render`."""

import os
import sys
from typing import TYPE_CHECKING

import click

from orchestrator.cli.jobs import asker
from orchestrator.cli.options import (
    backend_option,
    inventory_option,
    kind_option,
    plan_for,
    root_option,
    say,
    set_option,
    spec_argument,
)

if TYPE_CHECKING:
    from orchestrator.app.planning import Planned
    from orchestrator.app.submitting import Submitted
    from orchestrator.contract.drills import Drill
    from orchestrator.dashboard.commands import Commands


def _launchable(
    spec: str, overrides: tuple[str, ...], inventory: str | None, *, look: bool
) -> "Planned":
    """This machine is what it is: only of a cluster a file may say what there is."""
    planned = plan_for(spec, overrides, inventory, look=look)
    if inventory is not None and planned.spec.cluster.backend == "local":
        raise click.UsageError("--inventory needs a backend with hosts of its own: --backend slurm")
    return planned


def _drills(
    ctx: click.Context, param: click.Parameter, texts: tuple[str, ...]
) -> "tuple[Drill, ...]":
    if not texts:
        return ()
    from orchestrator.contract.codec import Invalid
    from orchestrator.contract.drills import parse_drill

    try:
        return tuple(parse_drill(text, number) for number, text in enumerate(texts, 1))
    except Invalid as exc:
        raise click.BadParameter(str(exc)) from exc


@click.command(
    epilog="Example: ndctl submit examples/quickstart.yaml --follow --drill kill:rank=1@step=25"
)
@spec_argument
@set_option
@backend_option
@root_option
@inventory_option
@click.option("--follow", is_flag=True, help="Stay, show progress, exit 0 only on success.")
@click.option("--dry-run", is_flag=True, help="Show what would be started, and start nothing.")
@click.option("--resume", is_flag=True, help="Go on with the run that ended or was cut off.")
@click.option("--new", is_flag=True, help="Start over; the old run is kept in .archive/.")
@click.option(
    "--drill",
    "drills",
    multiple=True,
    callback=_drills,
    metavar="FAULT",
    help="Make a fault happen once: kill|stop|raise|exit|busy|skip|shape|order|data:rank=R@step=S,"
    " kill:host=H@step=S.",
)
def submit(  # noqa: PLR0913 - click hands over one argument for each option
    spec: str,
    overrides: tuple[str, ...],
    on_backend: tuple[str, ...],
    run_root: str | None,
    inventory: str | None,
    follow: bool,
    dry_run: bool,
    resume: bool,
    new: bool,
    drills: "tuple[Drill, ...]",
) -> None:
    """Start a job, under supervision, and return; or follow it to its end."""
    from orchestrator.app import submitting
    from orchestrator.jobs import run_root_of
    from orchestrator.system import SystemClock

    if resume and new:
        raise click.UsageError("--resume and --new exclude each other")
    planned = _launchable(spec, (*overrides, *on_backend), inventory, look=True)
    submission = submitting.Submission(
        planned=planned,
        run_root=run_root_of(run_root, os.environ, planned.spec.run_root),
        drills=drills,
        resume=resume,
        new=new,
    )
    if dry_run:
        say(submitting.dry_run(submission, os.environ, SystemClock()))
        return
    submitted = submitting.submit(submission, os.environ, SystemClock())
    if planned.looked is not None and planned.looked.unchecked:
        say(f"note: {planned.looked.unchecked}", err=True)
    say(
        f"submitted {planned.spec.name} to {planned.spec.cluster.backend}: {submitted.run_dir.path}"
    )
    if follow:
        sys.exit(_followed(submitted))
    say(f"watch it with `{_commands(submitted).of('dashboard')}`")


@click.command(
    epilog="Example: ndctl render examples/kubernetes.yaml --kind jobset | kubectl apply -f -"
)
@spec_argument
@set_option
@backend_option
@kind_option
@root_option
@inventory_option
@click.option("--with-token", is_flag=True, help="On Kubernetes: print the job's Secret, too.")
def render(  # noqa: PLR0913 - click hands over one argument for each option
    spec: str,
    overrides: tuple[str, ...],
    on_backend: tuple[str, ...],
    of_kind: tuple[str, ...],
    run_root: str | None,
    inventory: str | None,
    with_token: bool,
) -> None:
    """Print exactly what `submit` starts: the manifests, the batch script, or each agent's
    command."""
    from orchestrator.app import submitting
    from orchestrator.jobs import run_root_of

    planned = _launchable(spec, (*overrides, *on_backend, *of_kind), inventory, look=False)
    if with_token and planned.spec.cluster.backend != "kubernetes":
        raise click.UsageError("--with-token needs --backend kubernetes: others keep it in a file")
    root = run_root_of(run_root, os.environ, planned.spec.run_root)
    submission = submitting.Submission(planned=planned, run_root=root)
    say(submitting.render(submission, os.environ))
    if with_token:
        say(f"---\n{submitting.render_token(submission)}")


def _commands(submitted: "Submitted") -> "Commands":
    from orchestrator.app.commands import commands_for
    from orchestrator.app.remote import Found

    return commands_for(Found(submitted.run_dir, submitted.copy), os.environ)


def _followed(submitted: "Submitted") -> int:
    """The exit code of a job that is followed to its end."""
    from orchestrator.app.remote import Found, await_begin, kept_fresh, lines_before
    from orchestrator.contract import exits
    from orchestrator.dashboard.session import follow_job
    from orchestrator.system import SystemClock

    found, clock = Found(submitted.run_dir, submitted.copy), SystemClock()
    name, ask, commands = submitted.run_dir.path.name, asker(found), _commands(submitted)
    try:
        if not await_begin(found, ask, clock, say):
            return exits.FAILED
        elsewhere = found.copy is not None
        known = lines_before(found, submitted.at) if elsewhere else submitted.known
        with kept_fresh(found):
            return follow_job(submitted.run_dir, known, clock, ask, commands)
    except KeyboardInterrupt:
        say(
            f"\n{name} runs on; see it with `{commands.of('dashboard')}`,"
            f" end it with `{commands.of('cancel')}`",
            err=True,
        )
        return exits.INTERRUPTED
