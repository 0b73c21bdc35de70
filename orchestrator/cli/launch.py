"""Commands that start jobs: `submit`, `render`."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import click

from orchestrator.cli.options import (
    backend_option,
    complete_job,
    find_all,
    inventory_option,
    keys_with_values,
    kind_option,
    looks_for,
    plan_for,
    root_option,
    say,
    set_option,
    spec_files,
    warn,
    warn_of_settings,
)

if TYPE_CHECKING:
    from orchestrator.app.planning.planned_hosts import Purpose
    from orchestrator.app.planning.plans import Planned
    from orchestrator.app.remote import Found
    from orchestrator.app.submission.payload import Submission
    from orchestrator.app.submission.submit_job import Submitted
    from orchestrator.app.submission.sweep_jobs import Element
    from orchestrator.cli.options import Looks
    from orchestrator.contract.drills import Drill
    from orchestrator.dashboard.command_hints import Commands


def _launchable(
    spec: str,
    overrides: tuple[str, ...],
    inventory: str | None,
    run_root: str | None,
    purpose: "Purpose",
    *,
    looks: "Looks",
) -> "Planned":
    """Plan a job. An inventory file can describe a cluster, but not this machine."""
    planned = plan_for(spec, overrides, inventory, looks=looks, run_root=run_root, purpose=purpose)
    if inventory is not None and planned.spec.cluster.backend == "local":
        raise click.UsageError("--inventory needs --backend slurm or kubernetes")
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
        told = (f"{problem.said}\n    fix: {problem.fix}" for problem in exc.problems)
        raise click.BadParameter("\n".join(told)) from exc


def _group_name(ctx: click.Context, param: click.Parameter, name: str) -> str:
    if name:
        from orchestrator.contract.spec.job_spec import NAME

        if not NAME.admits(name):
            raise click.BadParameter(f"{name!r} must be {NAME.words}")
    return name


drill_option = click.option(
    "--drill",
    "drills",
    multiple=True,
    callback=_drills,
    metavar="FAULT",
    help="Inject a fault once, such as kill:rank=1@step=25 or kill:host=1@step=9. Faults of a"
    " rank: kill, stop, slow, raise, exit, segv, oom, nan, busy, skip, shape, order, data, write."
    " Of a host: kill, warn.",
)


class _DryRunAlone(click.Command):
    """Reads `--dry-run` without a value as `--dry-run=server`. Click would take the next word,
    which may be SPEC, as the value."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        end = args.index("--") if "--" in args else len(args)
        given = ["--dry-run=server" if one == "--dry-run" else one for one in args[:end]]
        return super().parse_args(ctx, [*given, *args[end:]])


@click.command(
    cls=_DryRunAlone,
    epilog="Example: ndctl submit examples/quickstart.yaml --follow --drill kill:rank=1@step=25\n\n"
    "Exit codes: 0 submitted, or with --follow succeeded; 1 failed; 2 usage; 3 bad spec; 4 no plan;"
    " 5 the job exists or runs; 6 backend; 7 cancelled.",
)
@spec_files
@set_option
@backend_option
@root_option
@inventory_option
@click.option(
    "--follow", is_flag=True, help="Wait and show progress. Exit 0 only if the job succeeds."
)
@click.option(
    "--dry-run",
    type=click.Choice(["client", "server"]),
    metavar="[=client|server]",
    help="Show what would be started, and start nothing. server: the scheduler checks it. client:"
    " a Kubernetes cluster is not contacted.  [server]",
)
@click.option(
    "--here",
    is_flag=True,
    help="Run as a step in this Slurm allocation (salloc), and wait for the end.",
)
@click.option("--resume", is_flag=True, help="Resume the run that ended or was interrupted.")
@click.option("--new", is_flag=True, help="Start over. The old run is moved to .archive/.")
@click.option(
    "--sweep",
    multiple=True,
    callback=keys_with_values,
    metavar="KEY=A,B",
    help="Submit one job for each combination of these values. Job names include the values.",
)
@click.option(
    "--at-once",
    type=click.IntRange(min=1),
    metavar="N",
    help="With --sweep on Slurm: run at most N jobs at the same time.",
)
@click.option(
    "--group",
    default="",
    callback=_group_name,
    metavar="NAME",
    help="Name under which list, status, wait and cancel find this job with others."
    "  [with --sweep: the name in the spec]",
)
@click.option(
    "--after",
    "earlier",
    multiple=True,
    metavar="JOB",
    shell_complete=complete_job,
    help="Start when JOB has succeeded: in a queue on this machine, or as a dependency on Slurm.",
)
@drill_option
def submit(  # noqa: PLR0913 - click hands over one argument for each option
    spec: str,
    overrides: tuple[str, ...],
    on_backend: tuple[str, ...],
    run_root: str | None,
    inventory: str | None,
    follow: bool,
    dry_run: Literal["client", "server"] | None,
    here: bool,
    resume: bool,
    new: bool,
    sweep: tuple[str, ...],
    at_once: int | None,
    group: str,
    earlier: tuple[str, ...],
    drills: "tuple[Drill, ...]",
) -> None:
    """Submit a job and return. With --follow, wait for its end."""
    from orchestrator.app.submission import payload
    from orchestrator.job_paths import run_root_of

    if resume and new:
        raise click.UsageError("use either --resume or --new, not both")
    if here:
        if dry_run or sweep or inventory or earlier:
            raise click.UsageError(
                "--here cannot be combined with --dry-run, --sweep, --inventory or --after"
            )
        sys.exit(_submit_here(spec, overrides, run_root, resume, new, drills))
    if at_once is not None and not sweep:
        raise click.UsageError("--at-once needs --sweep")
    if sweep:
        if follow or drills:
            raise click.UsageError("--sweep cannot be combined with --follow or --drill")
        if dry_run == "client":
            raise click.UsageError("--sweep needs --dry-run=server: the scheduler checks each job")
        _submit_sweep(
            spec,
            (*overrides, *on_backend),
            sweep,
            dry_run=dry_run is not None,
            inventory=inventory,
            run_root=run_root,
            resume=resume,
            new=new,
            at_once=at_once,
            after=_earlier(earlier, run_root),
            group=group,
        )
        return
    purpose: Purpose = "render" if dry_run == "client" else "submit"
    settings = (*overrides, *on_backend)
    looks = looks_for(resume=resume)
    with _existing_first(spec, settings, run_root, again=resume or new):
        planned = _launchable(spec, settings, inventory, run_root, purpose, looks=looks)
    submission = payload.Submission(
        planned=planned,
        run_root=run_root_of(run_root, os.environ, planned.spec.run_root),
        drills=drills,
        resume=resume,
        new=new,
        group=group,
    )
    if earlier:
        from orchestrator.app.submission.after_jobs import with_after

        submission = with_after(submission, _earlier(earlier, run_root))
    if dry_run is not None:
        _print_dry_run(submission, asks=dry_run == "server")
    else:
        submit_one(submission, follow=follow)


@contextmanager
def _existing_first(
    spec: str, settings: tuple[str, ...], run_root: str | None, *, again: bool
) -> Iterator[None]:
    """Report that the job exists, in place of that its spec has no plan."""
    from pathlib import Path

    from orchestrator.app.submission import submit_job
    from orchestrator.errors import PlanError
    from orchestrator.system import SystemClock

    try:
        yield
    except PlanError:
        path, clock = Path(spec), SystemClock()
        submit_job.refuse_existing(path, settings, run_root, os.environ, clock, again=again)
        raise


def _earlier(names: tuple[str, ...], run_root: str | None) -> "tuple[Found, ...]":
    """The jobs of `--after`, which may be patterns."""
    if not names:
        return ()
    return tuple(found for found, _ in find_all(names, run_root, None))


def submit_one(submission: "Submission", *, follow: bool) -> None:
    """Submit, print what happened and, with `follow`, wait for the end and exit."""
    from orchestrator.app.submission import submit_job
    from orchestrator.system import SystemClock

    planned = submission.planned
    submitted = submit_job.submit(submission, os.environ, SystemClock())
    _print_notes(planned, submitted)
    say(
        f"submitted {planned.spec.name} to {planned.spec.cluster.backend}: {submitted.run_dir.path}"
    )
    if follow:
        say(_rank_map(planned))
        sys.exit(_followed(submitted))
    say(f"watch it with `{_commands(submitted).of('dashboard')}`")


def _rank_map(planned: "Planned") -> str:
    """The mesh, and the host and local rank of each mesh coordinate."""
    from orchestrator.plan.show.grid import grid
    from orchestrator.plan.show.tables import labelled

    plan = planned.plan
    lines = [*([] if plan.is_own else labelled("mesh", str(plan.mesh))), *grid(plan)]
    if planned.spec.cluster.backend != "local":
        # The leader places ranks again on the hosts that the scheduler grants (`ndctl describe`).
        lines.append("  planned hosts; the scheduler may grant others")
    return "\n".join(lines)


def _print_dry_run(submission: "Submission", *, asks: bool) -> None:
    """Print what would be started. Raises the error by which the scheduler refuses it."""
    from orchestrator.app.submission import submit_job
    from orchestrator.system import SystemClock

    tried = submit_job.dry_run(submission, os.environ, SystemClock(), asks=asks)
    say(tried.text)
    if tried.refused is not None:
        raise tried.refused


def _print_notes(planned: "Planned", submitted: "Submitted") -> None:
    """Print warnings and notes about a submitted job."""
    for one in submitted.warnings:
        warn(one)
    looked = planned.looked.notes if planned.looked is not None else ()
    for one in (*submitted.notes, *planned.notes, *looked):
        say(f"note: {one}", err=True)


def _submit_here(
    spec: str,
    overrides: tuple[str, ...],
    run_root: str | None,
    resume: bool,
    new: bool,
    drills: "tuple[Drill, ...]",
) -> int:
    """The exit code of a job that runs in this allocation."""
    from pathlib import Path

    from orchestrator.app.submission.here import run_here, submit_here
    from orchestrator.app.submission.inside import Wanted
    from orchestrator.system import SystemClock, run_command

    clock = SystemClock()
    wanted = Wanted(spec=Path(spec), overrides=overrides, run_root=run_root, resume=resume, new=new)
    job = submit_here(wanted, drills, os.environ, clock, run_command)
    say(f"{job.launch.job} runs on {', '.join(job.hosts)}: {job.launch.run_dir}; Ctrl-C ends it")
    return run_here(job, os.environ, clock, run_command, say)


def _submit_sweep(
    spec: str,
    overrides: tuple[str, ...],
    keys: tuple[str, ...],
    *,
    dry_run: bool,
    inventory: str | None,
    **more: Any,
) -> None:
    from pathlib import Path
    from shlex import quote

    from orchestrator.app.submission import sweep_jobs
    from orchestrator.system import SystemClock

    clock = SystemClock()
    hosts = None if inventory is None else Path(inventory)
    sweep = sweep_jobs.Sweep(
        spec=Path(spec), overrides=overrides, keys=keys, inventory=hosts, **more
    )
    elements = sweep_jobs.elements_of(sweep, os.environ, clock)
    first = elements[0].submission.planned
    warn_of_settings(first.spec, first.plan)
    if dry_run:
        say("\n".join(_element_text(element) for element in elements))
        return
    for element, submitted in sweep_jobs.submit_all(sweep, elements, os.environ, clock):
        for one in submitted.warnings:
            warn(f"{element.name}: {one}")
        say(f"submitted {element.name} ({' '.join(element.values)}): {submitted.run_dir.path}")
    group = quote(elements[0].submission.group)
    say(f"list them with `ndctl list {group}`, cancel them with `ndctl cancel {group}`")


def _element_text(element: "Element") -> str:
    from orchestrator.contract.check_results import words_of_finding
    from orchestrator.dashboard.format import count

    plan = element.submission.planned.plan
    ranks = count(plan.world_size, "rank")
    lines = [f"{element.name}: {' '.join(element.values)}; {ranks}, {plan.split}"]
    said = (line for one in element.said for line in words_of_finding(one).splitlines())
    return "\n".join([*lines, *(f"  {line}" for line in said)])


@click.command(
    epilog="Example: ndctl render examples/slurm.yaml > job.sh; sbatch job.sh\n\n"
    "ndctl render examples/kubernetes.yaml --kind jobset | kubectl apply -f -"
)
@spec_files
@set_option
@backend_option
@kind_option
@root_option
@inventory_option
@click.option("--with-token", is_flag=True, help="On Kubernetes: also print the Secret of the job.")
def render(  # noqa: PLR0913 - click hands over one argument for each option
    spec: str,
    overrides: tuple[str, ...],
    on_backend: tuple[str, ...],
    of_kind: tuple[str, ...],
    run_root: str | None,
    inventory: str | None,
    with_token: bool,
) -> None:
    """Print what `submit` starts: the manifests, the batch script, or the command of each agent."""
    from orchestrator.app.submission import payload, submit_job
    from orchestrator.job_paths import run_root_of

    settings = (*overrides, *on_backend, *of_kind)
    planned = _launchable(spec, settings, inventory, run_root, "render", looks="not")
    if with_token and planned.spec.cluster.backend != "kubernetes":
        raise click.UsageError(
            "--with-token needs --backend kubernetes: other backends keep the secret in a file"
        )
    root = run_root_of(run_root, os.environ, planned.spec.run_root)
    submission = payload.Submission(planned=planned, run_root=root)
    say(submit_job.render(submission, os.environ))
    if with_token:
        say(f"---\n{submit_job.render_token(submission)}")


def _commands(submitted: "Submitted") -> "Commands":
    from orchestrator.app.commands import commands_for
    from orchestrator.app.remote import Found

    return commands_for(Found(submitted.run_dir, submitted.copy), os.environ)


def _followed(submitted: "Submitted") -> int:
    """Follow the job to its end and return its exit code."""
    from orchestrator.app.remote import Found, await_begin, kept_fresh, lines_before
    from orchestrator.app.snapshots import asker
    from orchestrator.contract.files import exit_codes
    from orchestrator.dashboard.follow.follow_loop import follow_job
    from orchestrator.system import SystemClock

    found, clock = Found(submitted.run_dir, submitted.copy), SystemClock()
    name, commands = submitted.run_dir.path.name, _commands(submitted)
    ask = asker(found, os.environ, clock)
    try:
        if not await_begin(found, ask, clock, say):
            return exit_codes.FAILED
        elsewhere = found.copy is not None
        known = lines_before(found, submitted.at) if elsewhere else submitted.known
        with kept_fresh(found):
            return follow_job(submitted.run_dir, known, clock, ask, commands)
    except KeyboardInterrupt:
        say(
            f"\n{name} keeps running; watch it with `{commands.of('dashboard')}`,"
            f" cancel it with `{commands.of('cancel')}`",
            err=True,
        )
        return exit_codes.INTERRUPTED
