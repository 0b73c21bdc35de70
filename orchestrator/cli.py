"""The command line: parse, call `app`, print, exit.

Only click is imported here; what a verb needs is imported when it runs, so that `ndctl --help`
answers at once.
"""

import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from pathlib import Path

    from orchestrator.app.planning import Planned
    from orchestrator.contract.drills import Drill
    from orchestrator.contract.findings import Finding
    from orchestrator.contract.rundir import RunDir
    from orchestrator.contract.spec import JobSpec
    from orchestrator.dashboard.status import Snapshot
    from orchestrator.supervise.state import Run

EXIT_CODES = (
    "Exit codes: 0 success, 1 the job failed, 2 usage, 3 bad spec, 4 no plan, 5 job state, \
6 backend, 7 cancelled, 130 interrupted."
)


def complete_job(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    from pathlib import Path

    root = Path(ctx.params.get("run_root") or os.environ.get("NDCTL_RUN_ROOT") or "ndctl-runs")
    return [p.parent.name for p in root.glob(f"{incomplete}*/journal.jsonl")]


spec_argument = click.argument("spec")
job_argument = click.argument("job", shell_complete=complete_job)
set_option = click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a key of the spec."
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
inventory_option = click.option(
    "--inventory", metavar="FILE", help="The hosts to plan for. [the backend's]"
)
BACKENDS = click.Choice(["local", "slurm"])


def _as_setting(ctx: click.Context, param: click.Parameter, backend: str | None) -> tuple[str, ...]:
    return () if backend is None else (f"cluster.backend={backend}",)


backend_option = click.option(
    "--backend",
    "on_backend",
    type=BACKENDS,
    callback=_as_setting,
    help="Where it runs: short for --set cluster.backend=…  [the spec's]",
)
root_option = click.option(
    "--run-root", metavar="DIR", help="Where run directories are. [NDCTL_RUN_ROOT, else the spec's]"
)


@click.group(
    epilog=EXIT_CODES,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(package_name="ndctl")
def cli() -> None:
    """Plan, place, launch and supervise n-dimensional parallel training jobs."""


def main() -> None:
    """Entry point: errors that ndctl raises on purpose become one message and their exit code."""
    try:
        cli(prog_name="ndctl")
    except Exception as exc:
        from orchestrator.errors import NdctlError

        if not isinstance(exc, NdctlError):
            raise
        click.echo(f"error: {exc}", err=True)
        sys.exit(exc.exit_code)


def _planned(spec: str, overrides: tuple[str, ...], inventory: str | None = None) -> "Planned":
    from pathlib import Path

    from orchestrator.app import planning

    hosts = None if inventory is None else Path(inventory)
    return planning.plan_spec(Path(spec), overrides, os.environ, hosts)


def _launchable(spec: str, overrides: tuple[str, ...], inventory: str | None) -> "Planned":
    """This machine is what it is: only of a cluster a file may say what there is."""
    planned = _planned(spec, overrides, inventory)
    if inventory is not None and planned.spec.cluster.backend == "local":
        raise click.UsageError("--inventory needs a backend with hosts of its own: --backend slurm")
    return planned


def _job(name: str, run_root: str | None) -> "RunDir":
    from orchestrator.jobs import find_job, run_root_of

    return find_job(run_root_of(run_root, os.environ), name)


def _print_json(body: Any) -> None:
    import json

    click.echo(json.dumps(body, indent=2))


@cli.command(epilog="Example: ndctl validate examples/quickstart.yaml --set train.steps=100")
@spec_argument
@set_option
@json_option
@inventory_option
def validate(spec: str, overrides: tuple[str, ...], as_json: bool, inventory: str | None) -> None:
    """Check a job spec, and that a plan fits it; all errors at once."""
    from orchestrator.errors import BackendError

    try:
        planned = _planned(spec, overrides, inventory)
    except BackendError as exc:
        message = f"{spec} can be read, but not whether a plan fits it: {exc.message}"
        raise BackendError(message, fix=exc.fix) from exc
    if as_json:
        _print_json({"valid": True, "name": planned.spec.name, "mesh": str(planned.plan.mesh)})
        return
    click.echo(f"{spec}: valid; {planned.plan.world_size} ranks, {planned.plan.mesh}")


@cli.command(epilog="Example: ndctl schema > job.schema.json")
def schema() -> None:
    """Print the JSON schema of a job spec, for editors."""
    from orchestrator.schema import json_schema

    _print_json(json_schema())


def _keys_with_values(
    ctx: click.Context, param: click.Parameter, texts: tuple[str, ...]
) -> tuple[str, ...]:
    for text in texts:
        key, _, values = text.partition("=")
        if not key or not values:
            raise click.BadParameter(f"must be KEY=VALUE,VALUE, got {text}")
    return texts


@cli.command(
    epilog="Example: ndctl plan examples/llama3-8b.yaml --inventory"
    " examples/inventories/h100.yaml --compare parallel.tp=1,2,4,8"
)
@spec_argument
@set_option
@json_option
@inventory_option
@click.option(
    "--backend",
    type=BACKENDS,
    help="Plan for the hosts that this has. [the spec's cluster.backend]",
)
@click.option(
    "--compare",
    multiple=True,
    callback=_keys_with_values,
    metavar="KEY=A,B",
    help="Set the plans with these values side by side.",
)
@click.option("--zero", is_flag=True, help="Show what ZeRO-0 to 3 need on as many devices.")
def plan(  # noqa: PLR0913 - click hands over one argument for each option
    spec: str,
    overrides: tuple[str, ...],
    as_json: bool,
    inventory: str | None,
    backend: str | None,
    compare: tuple[str, ...],
    zero: bool,
) -> None:
    """Show how a job is best split over ranks, what it takes, how fast it goes, and why."""
    from pathlib import Path

    from orchestrator.app import planning
    from orchestrator.plan.show import compare as compared
    from orchestrator.plan.show import explain
    from orchestrator.plan.show.zero import describe_zero, zero_json

    if compare and zero:
        raise click.UsageError("--compare and --zero exclude each other")
    if backend is not None:
        overrides = (*overrides, f"cluster.backend={backend}")
    hosts = None if inventory is None else Path(inventory)
    if compare:
        found = planning.compare_plans(Path(spec), overrides, os.environ, hosts, compare)
        _print(as_json, found, compared.compared_json, compared.describe_compared)
    elif zero:
        table = planning.zero_of(Path(spec), overrides, os.environ, hosts)
        _print(as_json, table, zero_json, describe_zero)
    else:
        planned = planning.plan_spec(Path(spec), overrides, os.environ, hosts)
        _print(as_json, planned.plan, explain.plan_json, explain.describe_plan)


def _print(
    as_json: bool, value: Any, body: Callable[[Any], Any], text: Callable[[Any], str]
) -> None:
    if as_json:
        _print_json(body(value))
    else:
        click.echo(text(value))


@cli.command(epilog="Example: ndctl inventory --inventory examples/inventories/h100.yaml")
@click.option("--inventory", metavar="FILE", help="The hosts to show. [the backend's]")
@click.option("--backend", type=BACKENDS, default="local", help="Whose hosts. [this machine]")
@click.option("--partition", metavar="P", help="Slurm's nodes in this partition alone.")
@json_option
def inventory(inventory: str | None, backend: str, partition: str | None, as_json: bool) -> None:
    """Show the hosts that there are, as a tree of the switches between them."""
    from pathlib import Path

    from orchestrator.app import planning
    from orchestrator.cluster.show import describe_inventory, inventory_json

    if inventory is not None and backend != "local":
        raise click.UsageError("--inventory and --backend slurm exclude each other")
    if partition is not None and backend != "slurm":
        raise click.UsageError("--partition needs --backend slurm")
    file = None if inventory is None else Path(inventory)
    found = planning.inventory_at(file, os.environ, backend, partition)
    if as_json:
        _print_json(inventory_json(found))
    else:
        click.echo(describe_inventory(found))


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


@cli.command(
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
    help="Make a fault happen once: kill|stop|raise|exit:rank=R@step=S, kill:host=H@step=S.",
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
    planned = _launchable(spec, (*overrides, *on_backend), inventory)
    submission = submitting.Submission(
        planned=planned,
        run_root=run_root_of(run_root, os.environ, planned.spec.run_root),
        drills=drills,
        resume=resume,
        new=new,
    )
    if dry_run:
        click.echo(submitting.dry_run(submission, os.environ, SystemClock()))
        return
    submitted = submitting.submit(submission, os.environ, SystemClock())
    click.echo(
        f"submitted {planned.spec.name} to {planned.spec.cluster.backend}: {submitted.run_dir.path}"
    )
    if follow:
        sys.exit(_followed(submitted))
    click.echo(f"watch it with `ndctl dashboard {planned.spec.name}`")


@cli.command(epilog="Example: ndctl render examples/quickstart.yaml --backend slurm")
@spec_argument
@set_option
@backend_option
@root_option
@inventory_option
def render(
    spec: str,
    overrides: tuple[str, ...],
    on_backend: tuple[str, ...],
    run_root: str | None,
    inventory: str | None,
) -> None:
    """Print exactly what `submit` starts: the batch script, or each agent's command."""
    from orchestrator.app import submitting
    from orchestrator.jobs import run_root_of

    planned = _launchable(spec, (*overrides, *on_backend), inventory)
    root = run_root_of(run_root, os.environ, planned.spec.run_root)
    click.echo(submitting.render(submitting.Submission(planned=planned, run_root=root), os.environ))


def _held(run: "Run") -> str | None:
    """What a scheduler that still has a job without a leader says of it."""
    from orchestrator.app import schedulers
    from orchestrator.system import SystemClock

    words, held = schedulers.scheduler_words([(run, False)], os.environ, SystemClock())[0]
    return words if held else None


def _followed(submitted: Any) -> int:
    """The exit code of a job that is followed to its end."""
    from orchestrator.contract import exits
    from orchestrator.dashboard.session import follow_job
    from orchestrator.system import SystemClock

    name = submitted.run_dir.path.name
    try:
        return follow_job(submitted.run_dir, submitted.known, SystemClock(), _held)
    except KeyboardInterrupt:
        click.echo(
            f"\n{name} runs on; see it with `ndctl dashboard {name}`,"
            f" end it with `ndctl cancel {name}`",
            err=True,
        )
        return exits.INTERRUPTED


def _with_scheduler(snapshots: "list[Snapshot]") -> "list[Snapshot]":
    """What a scheduler says of the jobs is asked for where there is one."""
    from dataclasses import replace

    if all(found.is_local for found in snapshots):
        return snapshots
    from orchestrator.app import schedulers
    from orchestrator.system import SystemClock

    jobs = [(found.seen.run, found.leader_alive) for found in snapshots]
    said = schedulers.scheduler_words(jobs, os.environ, SystemClock())
    return [
        replace(found, scheduler=words, held=held)
        for found, (words, held) in zip(snapshots, said, strict=True)
    ]


@cli.command("list", epilog="Example: ndctl list --json")
@root_option
@json_option
def list_jobs(run_root: str | None, as_json: bool) -> None:
    """Show every job of the run root."""
    from orchestrator.dashboard.status import list_rows, list_text, read_snapshot
    from orchestrator.jobs import jobs, run_root_of
    from orchestrator.system import SystemClock

    now = SystemClock().now()
    root = run_root_of(run_root, os.environ)
    found = (read_snapshot(run_dir, now) for run_dir in jobs(root))
    rows = list_rows(_with_scheduler([one for one in found if one is not None]))
    if as_json:
        _print_json(rows)
    else:
        click.echo(list_text(rows, None) if rows else f"no jobs in {root.absolute()}")


@cli.command(epilog="Example: ndctl status quickstart --json")
@job_argument
@root_option
@json_option
def status(job: str, run_root: str | None, as_json: bool) -> None:
    """Show where a job stands, in a few lines."""
    from orchestrator.dashboard.status import status_json, status_text

    snapshot = _snapshot(job, run_root)
    if as_json:
        _print_json(status_json(snapshot))
    else:
        click.echo(status_text(snapshot, None))


def _snapshot(job: str, run_root: str | None) -> "Snapshot":
    from orchestrator.dashboard.status import read_snapshot
    from orchestrator.errors import JobError
    from orchestrator.system import SystemClock

    snapshot = read_snapshot(_job(job, run_root), SystemClock().now())
    if snapshot is None:
        raise JobError(
            f"job {job} was never submitted to its end", fix="submit it again with --new"
        )
    return _with_scheduler([snapshot])[0]


@cli.command(epilog="Example: ndctl describe quickstart")
@job_argument
@root_option
@json_option
def describe(job: str, run_root: str | None, as_json: bool) -> None:
    """Show all that is known of a job: plan, hosts, each incident with its evidence."""
    from orchestrator.contract.checkpoints import newest_complete
    from orchestrator.dashboard.describe import describe_text
    from orchestrator.dashboard.status import status_json

    snapshot = _snapshot(job, run_root)
    if as_json:
        _print_json(status_json(snapshot))
    else:
        passed_over = newest_complete(snapshot.run_dir.checkpoints)[1]
        click.echo(describe_text(snapshot, None, passed_over))


@cli.command(epilog="Example: ndctl logs quickstart --rank 1 --attempt 1")
@job_argument
@root_option
@click.option("--rank", type=int, help="This rank's log alone.")
@click.option("--attempt", type=int, help="This attempt's logs. [the newest]")
@click.option("--tail", type=int, metavar="N", help="Only the last N lines of each log.")
@click.option("--follow", is_flag=True, help="Go on as the logs grow, until the job ends.")
def logs(
    job: str,
    run_root: str | None,
    rank: int | None,
    attempt: int | None,
    tail: int | None,
    follow: bool,
) -> None:
    """Print the ranks' logs, merged, each line with its host and rank."""
    from orchestrator.dashboard.logs import painted
    from orchestrator.dashboard.session import log_lines
    from orchestrator.system import SystemClock

    run_dir = _job(job, run_root)
    shown = painted if sys.stdout.isatty() else str
    try:
        for line in log_lines(run_dir, SystemClock(), _held, rank, attempt, tail, follow):
            click.echo(shown(line))
    except KeyboardInterrupt:
        sys.exit(130)


@cli.command(epilog="Example: ndctl events quickstart")
@job_argument
@root_option
@json_option
def events(job: str, run_root: str | None, as_json: bool) -> None:
    """Print the journal: what happened, and what was decided."""
    from orchestrator.dashboard.narrate import event_line
    from orchestrator.supervise.log import read, to_line

    for entry in read(_job(job, run_root).journal):
        click.echo(to_line(entry).decode().rstrip() if as_json else event_line(entry, None))


@cli.command(epilog="Example: ndctl dashboard quickstart   (q leaves it)")
@job_argument
@root_option
def dashboard(job: str, run_root: str | None) -> None:
    """Watch a job: health of every rank, incidents, loss, checkpoints."""
    from rich.console import Console

    from orchestrator.dashboard.live import run_dashboard, terminal_keys
    from orchestrator.system import SystemClock

    clock = SystemClock()
    with terminal_keys(clock) as keys:
        run_dir = _job(job, run_root)
        run_dashboard(run_dir, console=Console(), clock=clock, keys=keys, ask=_held)


@cli.command(epilog="Example: ndctl cancel quickstart")
@job_argument
@root_option
@click.option("--no-wait", is_flag=True, help="Return at once, not when the job has ended.")
def cancel(job: str, run_root: str | None, no_wait: bool) -> None:
    """End a job: its ranks write a checkpoint and leave."""
    from orchestrator.app import cancelling
    from orchestrator.system import SystemClock

    run_dir = _job(job, run_root)
    click.echo(cancelling.cancel(run_dir, os.environ, SystemClock()))
    if not no_wait:
        click.echo(cancelling.wait_until_ended(run_dir, os.environ, SystemClock()))


def _wish(spec: str | None, overrides: tuple[str, ...]) -> "JobSpec | None":
    from pathlib import Path

    from orchestrator.load import read_spec

    return read_spec(Path(spec), overrides) if spec else None


def _slurm_findings(root: "Path", wish: "JobSpec | None") -> "tuple[Finding, ...]":
    from pathlib import Path

    from orchestrator.contract.slurm import SlurmSpec
    from orchestrator.doctor.slurm import examine_slurm
    from orchestrator.system import run_command

    slurm = wish.cluster.slurm if wish else SlurmSpec()
    return examine_slurm(root, slurm, run_command, Path("/proc/mounts").read_text())


@cli.command(epilog="Example: ndctl doctor examples/quickstart.yaml")
@click.argument("spec", required=False)
@set_option
@root_option
@click.option(
    "--backend", type=click.Choice(["local", "slurm"]), help="Where it is to run. [the spec's]"
)
@json_option
def doctor(
    spec: str | None,
    overrides: tuple[str, ...],
    run_root: str | None,
    backend: str | None,
    as_json: bool,
) -> None:
    """Find what on this machine or its cluster would stop a job; with SPEC, that job."""
    from orchestrator.contract.codec import encode
    from orchestrator.doctor.machine import describe_findings, examine
    from orchestrator.jobs import run_root_of
    from orchestrator.system import SystemClock, run_command

    wish = _wish(spec, overrides)
    root = run_root_of(run_root, os.environ, wish.run_root if wish else "")
    if backend is None:
        backend = wish.cluster.backend if wish else "local"
    # Ranks that run elsewhere take nothing of this machine.
    here = _planned(spec, overrides).plan if spec and backend == "local" else None
    findings = examine(root, here, os.environ, run_command, SystemClock())
    if backend == "slurm":
        findings += _slurm_findings(root, wish)
    if as_json:
        _print_json(encode(findings))
    else:
        click.echo(describe_findings(findings))
    sys.exit(1 if any(finding.verdict == "stops" for finding in findings) else 0)


@cli.group(invoke_without_command=True, epilog="Example: ndctl hosts --json")
@root_option
@json_option
@click.pass_context
def hosts(ctx: click.Context, run_root: str | None, as_json: bool) -> None:
    """Show the hosts that broke jobs, per cluster, and which are left out until when."""
    from orchestrator.jobs import run_root_of
    from orchestrator.strikes import hosts_json, hosts_text, records
    from orchestrator.system import SystemClock

    root = run_root_of(run_root, os.environ)
    if ctx.invoked_subcommand is not None:
        ctx.obj = root
        return
    found = records(root, SystemClock().now())
    if as_json:
        _print_json(hosts_json(found))
    else:
        click.echo(hosts_text(found) or f"no strikes in {root.absolute()}")


@hosts.command("clear", epilog="Example: ndctl hosts clear node7")
@click.argument("host")
@click.option("--cluster", metavar="NAME", help="Of this cluster alone. [every one]")
@click.pass_obj
def clear_host(root: "Path", host: str, cluster: str | None) -> None:
    """Forget a host's strikes: it is in order again."""
    from orchestrator.app import hosts
    from orchestrator.system import SystemClock

    click.echo(hosts.clear_host(root, host, cluster, SystemClock()))
