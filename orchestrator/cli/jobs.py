"""Jobs that there are: `list`, `status`, `describe`, `diagnose`, `logs`, `events`, and so on."""

import os
import sys
from typing import TYPE_CHECKING

import click

from orchestrator.cli.options import find, job_argument, json_option, print_json, root_option

if TYPE_CHECKING:
    from orchestrator.dashboard.status import Snapshot
    from orchestrator.supervise.state import Run


def held(run: "Run") -> str | None:
    """What a scheduler that still has a job without a leader says of it."""
    from orchestrator.app import schedulers
    from orchestrator.system import SystemClock

    words, held = schedulers.scheduler_words([(run, False)], os.environ, SystemClock())[0]
    return words if held else None


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


@click.command("list", epilog="Example: ndctl list --json")
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
        print_json(rows)
    else:
        click.echo(list_text(rows, None) if rows else f"no jobs in {root.absolute()}")


@click.command(epilog="Example: ndctl status quickstart --json")
@job_argument
@root_option
@json_option
def status(job: str, run_root: str | None, as_json: bool) -> None:
    """Show where a job stands, in a few lines."""
    from orchestrator.dashboard.status import status_json, status_text

    snapshot = _snapshot(job, run_root)
    if as_json:
        print_json(status_json(snapshot))
    else:
        click.echo(status_text(snapshot, None))


def _snapshot(job: str, run_root: str | None) -> "Snapshot":
    from orchestrator.dashboard.status import read_snapshot
    from orchestrator.errors import JobError
    from orchestrator.system import SystemClock

    snapshot = read_snapshot(find(job, run_root), SystemClock().now())
    if snapshot is None:
        raise JobError(
            f"job {job} was never submitted to its end", fix="submit it again with --new"
        )
    return _with_scheduler([snapshot])[0]


@click.command(epilog="Example: ndctl describe quickstart")
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
        print_json(status_json(snapshot))
    else:
        passed_over = newest_complete(snapshot.run_dir.checkpoints)[1]
        click.echo(describe_text(snapshot, None, passed_over))


@click.command(
    epilog="Example: ndctl diagnose quickstart   or: ndctl diagnose /scratch/dumps --json"
)
@click.argument("target", metavar="JOB|TRACE_DIR")
@root_option
@click.option("--attempt", type=int, help="This attempt of the job. [the newest that hung]")
@json_option
def diagnose(target: str, run_root: str | None, attempt: int | None, as_json: bool) -> None:
    """Find who holds a job up, from dumps of flight recorders and stacks, of any job."""
    from pathlib import Path

    from orchestrator.app.diagnosing import diagnose_folder, diagnose_job, diagnosis_json
    from orchestrator.diagnosis.words import diagnosis_text

    if Path(target).is_dir() and not Path(target, "journal.jsonl").exists():
        scene, verdict = diagnose_folder(Path(target))
    else:
        scene, verdict = diagnose_job(find(target, run_root), attempt)
    if as_json:
        print_json(diagnosis_json(scene, verdict))
    else:
        click.echo(diagnosis_text(verdict, scene))


@click.command(epilog="Example: ndctl logs quickstart --rank 1 --attempt 1")
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

    run_dir = find(job, run_root)
    shown = painted if sys.stdout.isatty() else str
    try:
        for line in log_lines(run_dir, SystemClock(), held, rank, attempt, tail, follow):
            click.echo(shown(line))
    except KeyboardInterrupt:
        sys.exit(130)


@click.command(epilog="Example: ndctl events quickstart")
@job_argument
@root_option
@json_option
def events(job: str, run_root: str | None, as_json: bool) -> None:
    """Print the journal: what happened, and what was decided."""
    from orchestrator.dashboard.narrate import event_line
    from orchestrator.supervise.log import read, to_line

    for entry in read(find(job, run_root).journal):
        click.echo(to_line(entry).decode().rstrip() if as_json else event_line(entry, None))


@click.command(epilog="Example: ndctl dashboard quickstart   (q leaves it)")
@job_argument
@root_option
def dashboard(job: str, run_root: str | None) -> None:
    """Watch a job: health of every rank, incidents, loss, checkpoints."""
    from rich.console import Console

    from orchestrator.dashboard.live import run_dashboard, terminal_keys
    from orchestrator.system import SystemClock

    clock = SystemClock()
    with terminal_keys(clock) as keys:
        run_dir = find(job, run_root)
        run_dashboard(run_dir, console=Console(), clock=clock, keys=keys, ask=held)


@click.command(epilog="Example: ndctl cancel quickstart")
@job_argument
@root_option
@click.option("--no-wait", is_flag=True, help="Return at once, not when the job has ended.")
def cancel(job: str, run_root: str | None, no_wait: bool) -> None:
    """End a job: its ranks write a checkpoint and leave."""
    from orchestrator.app import cancelling
    from orchestrator.system import SystemClock

    run_dir = find(job, run_root)
    click.echo(cancelling.cancel(run_dir, os.environ, SystemClock()))
    if not no_wait:
        click.echo(cancelling.wait_until_ended(run_dir, os.environ, SystemClock()))
