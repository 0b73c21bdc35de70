"""Commands for one existing job or a few: `status`, `describe`, `diagnose`, `logs`, `events`,
`dashboard`, `cancel`."""

import contextlib
import os
import sys
from typing import TYPE_CHECKING

import click

from orchestrator.cli.options import (
    complete_job,
    find,
    find_all,
    job_argument,
    jobs_argument,
    json_option,
    place_options,
    print_json,
    root_option,
    say,
    say_report,
    since_option,
    warn,
)

if TYPE_CHECKING:
    from orchestrator.app.remote import Found, Place
    from orchestrator.dashboard.follow.logs import LogLine
    from orchestrator.dashboard.snapshot import Snapshot


MOST_MISSING = 4
"""Maximum number of warnings about logs that could not be read."""


@click.command(epilog="Example: ndctl status quickstart --json   or: ndctl status 'sweep-*'")
@jobs_argument
@root_option
@place_options
@json_option
def status(
    jobs: tuple[str, ...], run_root: str | None, place: "Place | None", as_json: bool
) -> None:
    """Show the state of one or more jobs. With --json, several jobs are a list, `jobs`."""
    from orchestrator.app.snapshots import snapshots_of
    from orchestrator.dashboard.status import status_json, status_text
    from orchestrator.system import SystemClock

    found = find_all(jobs, run_root, place, warns=False)
    snapshots = snapshots_of(found, os.environ, SystemClock())
    if as_json:
        told = [status_json(snapshot) for snapshot in snapshots]
        print_json(told[0] if _is_one(jobs, found) else {"jobs": told})
    else:
        say_report("\n\n".join(status_text(snapshot, None) for snapshot in snapshots))


def _is_one(jobs: tuple[str, ...], found: "list[tuple[Found, bool]]") -> bool:
    """Whether one job was named, and not a pattern or a group."""
    return len(jobs) == 1 and [by_name for _, by_name in found] == [True]


def _snapshot(job: str, run_root: str | None, place: "Place | None") -> "Snapshot":
    from orchestrator.app.snapshots import snapshot_of
    from orchestrator.system import SystemClock

    return snapshot_of(find(job, run_root, place, warns=False), os.environ, SystemClock())


@click.command(epilog="Example: ndctl describe quickstart")
@job_argument
@root_option
@place_options
@json_option
def describe(job: str, run_root: str | None, place: "Place | None", as_json: bool) -> None:
    """Show all details of a job: plan, hosts, and each incident with its evidence."""
    from orchestrator.contract.files.checkpoint_names import newest_complete
    from orchestrator.dashboard.describe import describe_json, describe_text

    snapshot = _snapshot(job, run_root, place)
    if as_json:
        print_json(describe_json(snapshot))
    else:
        passed_over = newest_complete(snapshot.run_dir.checkpoints)[1]
        say_report(describe_text(snapshot, None, passed_over))


@click.command(
    epilog="Example: ndctl diagnose quickstart   or: ndctl diagnose /scratch/dumps --json"
)
@click.argument("target", metavar="JOB|TRACE_DIR")
@root_option
@place_options
@click.option("--attempt", type=int, help="Attempt of the job. [newest that hung]")
@json_option
def diagnose(
    target: str,
    run_root: str | None,
    place: "Place | None",
    attempt: int | None,
    as_json: bool,
) -> None:
    """Find the rank that blocks a job, from flight recorder dumps and stacks.

    Works for the jobs of ndctl, and for a folder of dumps of any PyTorch job.
    """
    from pathlib import Path

    from orchestrator.app.diagnose_job import (
        diagnose_folder,
        diagnose_job,
        diagnosis_json,
        job_json,
        job_text,
    )
    from orchestrator.diagnosis.hang.report import diagnosis_text
    from orchestrator.errors import JobError

    if Path(target).exists() and not Path(target, "journal.jsonl").exists():
        scene, verdict = diagnose_folder(Path(target))
        body, text = diagnosis_json(scene, verdict), diagnosis_text(verdict, scene)
    elif "/" in target and not Path(target).exists():  # no name of a job has a slash
        raise JobError(
            f"there is no folder {target}", fix="give a folder with dumps, or the name of a job"
        )
    else:
        found = diagnose_job(_snapshot(target, run_root, place), attempt)
        body, text = job_json(found), job_text(found)
    if as_json:
        print_json(body)
    else:
        say(text)


def _pattern(ctx: click.Context, param: click.Parameter, pattern: str | None) -> str:
    if pattern is None:
        return ""
    from orchestrator.diagnosis.logs.patterns import problem_of

    if (problem := problem_of(pattern)) is not None:
        raise click.BadParameter(f"it must be {problem[0]}; {problem[1]}")
    return pattern


@click.command(epilog="Example: ndctl logs quickstart -f --grep 'loss|error' --since 10m")
@job_argument
@root_option
@place_options
@click.option("--rank", type=int, help="Only the log of this rank.")
@click.option("--host", "hosts", multiple=True, metavar="HOST", help="Only logs of this host.")
@click.option("--attempt", type=int, help="Logs of this attempt. [newest]")
@click.option(
    "--tail", type=click.IntRange(min=0), metavar="N", help="Only the last N lines of each log."
)
@since_option
@click.option(
    "--grep",
    "pattern",
    callback=_pattern,
    metavar="REGEX",
    help="Only lines that match, in any case (RE2).",
)
@click.option("-f", "--follow", is_flag=True, help="Print new lines until the job ends.")
@click.option("--agents", is_flag=True, help="Logs of the agents and the leader, not of the ranks.")
def logs(  # noqa: PLR0913 - click hands over one argument for each option
    job: str,
    run_root: str | None,
    place: "Place | None",
    rank: int | None,
    hosts: tuple[str, ...],
    attempt: int | None,
    tail: int | None,
    since_s: float | None,
    pattern: str,
    follow: bool,
    agents: bool,
) -> None:
    """Print the merged logs of the ranks, each line with its host and rank."""
    from orchestrator.app.remote import fetch_logs, kept_fresh, settled
    from orchestrator.app.snapshots import asker
    from orchestrator.dashboard.follow.follow_loop import EndDetector, agent_lines, log_lines
    from orchestrator.dashboard.follow.log_filter import LogFilter, wanted
    from orchestrator.dashboard.follow.logs import silence_text
    from orchestrator.system import SystemClock

    if agents and (follow or hosts or rank is not None or attempt is not None):
        raise click.UsageError(
            "--agents takes no --rank, --host, --attempt or --follow: one agent log covers all"
            " attempts"
        )
    found, clock = find(job, run_root, place), SystemClock()
    since = None if since_s is None else clock.now() - since_s
    given = LogFilter(now=clock.now(), since=since, pattern=pattern)
    missing = fetch_logs(found, rank, attempt)
    for words in missing[:MOST_MISSING]:
        warn(words)
    if len(missing) > MOST_MISSING:
        warn(f"logs of {len(missing) - MOST_MISSING:,} more pods could not be read")
    if agents:
        for line in wanted(agent_lines(found.run_dir, tail), given):
            _say_line(line)
        return
    ask = asker(found, os.environ, clock)
    ended = settled(found, EndDetector(found.run_dir, clock, ask), clock)
    lines = log_lines(found.run_dir, clock, ended, rank, attempt, tail, follow, hosts)
    try:
        with kept_fresh(found, logs=True) if follow else contextlib.nullcontext():
            printed = False
            for line in wanted(lines, given):
                printed = True
                _say_line(line)
    except KeyboardInterrupt:
        sys.exit(130)
    # An empty answer looks like a mistake of ndctl, most of all to a person who looks for a cause.
    if not printed and (silence := silence_text(found.run_dir, rank, attempt, hosts)):
        say(silence, err=True)


def _say_line(line: "LogLine") -> None:
    from orchestrator.dashboard.follow.logs import colour_of

    colour = colour_of(line.file)
    say(f" {line.text}", label=f"[{line.file.label}]", fg=colour, dim=colour is None)


@click.command(epilog="Example: ndctl events quickstart -f --since 1h")
@job_argument
@root_option
@place_options
@click.option("-f", "--follow", is_flag=True, help="Print new events until the job ends.")
@since_option
@click.option("--heartbeats", is_flag=True, help="Show each late heartbeat. [counted]")
@json_option
def events(  # noqa: PLR0913 - click hands over one argument for each option
    job: str,
    run_root: str | None,
    place: "Place | None",
    follow: bool,
    since_s: float | None,
    heartbeats: bool,
    as_json: bool,
) -> None:
    """Print the events and decisions of a job in order of time.

    With --json, print the lines of the journal.
    """
    from orchestrator.app.remote import kept_fresh
    from orchestrator.app.snapshots import asker
    from orchestrator.dashboard.event_text import event_time
    from orchestrator.dashboard.follow.events import QuietDecisions, event_batches, event_lines
    from orchestrator.dashboard.follow.follow_loop import EndDetector
    from orchestrator.journal.journal import to_json
    from orchestrator.system import SystemClock

    found, clock, quiet = find(job, run_root, place), SystemClock(), QuietDecisions()
    since = 0.0 if since_s is None else clock.now() - since_s
    ended = EndDetector(found.run_dir, clock, asker(found, os.environ, clock))
    try:
        with kept_fresh(found) if follow else contextlib.nullcontext():
            for entries in event_batches(found.run_dir, clock, ended, follow=follow):
                if not as_json:
                    said = event_lines(entries, None, since, heartbeats=heartbeats, quiet=quiet)
                    for line in said:
                        say_report(line)
                    continue
                for entry in entries:  # in the order of the journal, so that it can be replayed
                    if event_time(entry.event) >= since:
                        print_json(to_json(entry), indent=None)
    except KeyboardInterrupt:
        sys.exit(130)


@click.command(epilog="Example: ndctl dashboard   or: ndctl dashboard quickstart   (? shows keys)")
@click.argument("job", required=False, shell_complete=complete_job)
@click.option("--plain", is_flag=True, help="Without keys: one picture of JOB that follows it.")
@root_option
@place_options
def dashboard(job: str | None, plain: bool, run_root: str | None, place: "Place | None") -> None:
    """Watch all jobs, one job, its hosts and ranks: health, curves, logs, incidents.

    Keys open what is selected, show logs, events, metrics, stacks, and cancel a job. Without a
    terminal, prints one picture.
    """
    # textual draws on stderr, so `2>file` would leave the terminal empty.
    keys = not plain and all(one.isatty() for one in (sys.stdin, sys.stdout, sys.stderr))
    if keys and not _has_textual():
        warn(f"no keys without textual: `{sys.executable} -m pip install 'ndctl[dashboard]'`")
        keys = False
    if keys:
        _dashboard_with_keys(job, run_root, place)
    elif job is None:
        from orchestrator.cli.fleet import print_jobs

        print_jobs(run_root, place)
    else:
        _plain_dashboard(job, run_root, place)


def _has_textual() -> bool:
    from importlib.util import find_spec

    return find_spec("textual") is not None


def _dashboard_with_keys(job: str | None, run_root: str | None, place: "Place | None") -> None:
    from orchestrator.app.fleet.dashboard import JobServices
    from orchestrator.app.fleet.known_jobs import Scope
    from orchestrator.app.remote import await_begin
    from orchestrator.app.snapshots import asker
    from orchestrator.dashboard.interactive.app import run_app
    from orchestrator.dashboard.interactive.places import Place as Page
    from orchestrator.system import SystemClock

    clock, named, first = SystemClock(), None, Page(kind="fleet")
    if job is not None:
        named = find(job, run_root, place)
        await_begin(named, asker(named, os.environ, clock), clock, say)
        first = Page(kind="job", job=str(named.run_dir.path))
    scope = Scope(run_root=run_root, place=place)
    run_app(JobServices(scope, os.environ, clock, named), first, clock)


def _plain_dashboard(job: str, run_root: str | None, place: "Place | None") -> None:
    from orchestrator.app.commands import commands_for
    from orchestrator.app.remote import await_begin, kept_fresh
    from orchestrator.app.snapshots import asker
    from orchestrator.dashboard.console import VisibleConsole
    from orchestrator.dashboard.screen.live import run_dashboard, terminal_keys
    from orchestrator.system import SystemClock

    clock, console = SystemClock(), VisibleConsole()
    found = find(job, run_root, place)
    ask = asker(found, os.environ, clock)
    if console.is_terminal:
        await_begin(found, ask, clock, say)
    with terminal_keys(clock) as keys, kept_fresh(found):
        run_dashboard(
            found.run_dir,
            console=console,
            clock=clock,
            keys=keys,
            ask=ask,
            commands=commands_for(found, os.environ),
        )


@click.command(epilog="Example: ndctl cancel quickstart   or: ndctl cancel 'sweep-*'")
@jobs_argument
@root_option
@place_options
@click.option("--no-wait", is_flag=True, help="Return without waiting for the jobs to end.")
@click.option("--by", metavar="NAME", help="Who cancels them, for the journal.  [you]")
def cancel(
    jobs: tuple[str, ...],
    run_root: str | None,
    place: "Place | None",
    no_wait: bool,
    by: str | None,
) -> None:
    """Cancel jobs. Their ranks write a checkpoint and exit."""
    from orchestrator.app.cancel_jobs import after_interrupt
    from orchestrator.contract.files import exit_codes

    found: list[Found] = []
    try:
        named = find_all(jobs, run_root, place)
        found = [one for one, _ in named]
        _cancel(found, is_one=_is_one(jobs, named), wait=not no_wait, by=by)
    except KeyboardInterrupt:
        say(f"\ninterrupted; {after_interrupt(found, os.environ)}", err=True)
        sys.exit(exit_codes.INTERRUPTED)


def _cancel(found: "list[Found]", *, is_one: bool, wait: bool, by: str | None) -> None:
    from orchestrator.app import cancel_job
    from orchestrator.app.cancel_jobs import cancel_all
    from orchestrator.app.remote import kept_fresh
    from orchestrator.system import SystemClock

    clock = SystemClock()
    if not is_one:
        outcome = cancel_all(found, os.environ, clock, say, wait=wait, by=by)
        say(outcome.words)
        if outcome.error is not None:
            raise outcome.error
        return
    (one,) = found
    say(cancel_job.cancel(one.run_dir, os.environ, clock, one, by))
    if wait:
        with kept_fresh(one):
            say(cancel_job.wait_until_ended(one.run_dir, os.environ, clock, one))
