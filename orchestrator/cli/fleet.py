"""Commands about all jobs of a user or a site: `list`, `wait`, `prune`."""

import os
import shutil
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import click

from orchestrator.cli.options import (
    complete_job,
    find_all,
    jobs_argument,
    json_option,
    place_options,
    print_json,
    root_option,
    say,
    say_line,
    time_span,
    warn,
)

if TYPE_CHECKING:
    from orchestrator.app.fleet.known_jobs import Scope
    from orchestrator.app.fleet.summaries import Reader
    from orchestrator.app.remote import Place
    from orchestrator.dashboard.fleet.columns import Line
    from orchestrator.dashboard.fleet.row import JobRow

WATCH_S = 2.0
"""Seconds between two looks of `--watch`."""


def _states(ctx: click.Context, param: click.Parameter, texts: tuple[str, ...]) -> frozenset[str]:
    if not texts:
        return frozenset()
    from orchestrator.contract.codec import nearest
    from orchestrator.dashboard.fleet.row import ROW_STATES

    states = frozenset(one.strip().upper() for text in texts for one in text.split(","))
    for state in sorted(states - {*ROW_STATES}):
        near = nearest(state, ROW_STATES)
        meant = f"did you mean {near}? " if near else ""
        raise click.BadParameter(f"{state} is no state; {meant}States: {', '.join(ROW_STATES)}")
    return states


state_option = click.option(
    "--state",
    "states",
    multiple=True,
    callback=_states,
    metavar="STATE",
    help="Only jobs in this state; several: RUNNING,FAILED.",
)
user_option = click.option("--user", metavar="NAME", help="Only jobs of this user.")


@click.command("list", epilog="Example: ndctl list 'sweep-*' --state RUNNING,FAILED --watch")
@click.argument("patterns", metavar="[PATTERN]...", nargs=-1, shell_complete=complete_job)
@state_option
@user_option
@click.option(
    "--all", "with_all", is_flag=True, help="Also archived runs, and jobs that ended long ago."
)
@click.option("--watch", is_flag=True, help="Show the table again every 2 s until Ctrl-C.")
@root_option
@place_options
@json_option
def list_jobs(  # noqa: PLR0913 - click hands over one argument for each option
    patterns: tuple[str, ...],
    states: frozenset[str],
    user: str | None,
    with_all: bool,
    watch: bool,
    run_root: str | None,
    place: "Place | None",
    as_json: bool,
) -> None:
    """List jobs: yours from everywhere, and those of the site's index.

    Trouble comes first. With PATTERN, only the jobs whose names match; with --run-root, only the
    jobs in that folder.
    """
    from orchestrator.app.fleet.known_jobs import Scope
    from orchestrator.app.fleet.summaries import Reader
    from orchestrator.system import SystemClock

    if watch and (as_json or not sys.stdout.isatty()):
        raise click.UsageError("--watch needs a terminal, and cannot be combined with --json")
    scope = Scope(patterns=patterns, run_root=run_root, place=place, user=user, archived=with_all)
    clock = SystemClock()
    reader = Reader(os.environ, clock)
    if watch:
        _watch(scope, states, reader)
        return
    rows = _rows(scope, states, reader)
    if as_json:
        from orchestrator.dashboard.fleet.row import row_json

        print_json({"jobs": [row_json(row, clock.now()) for row in rows]})
        return
    everything = with_all or bool(states or patterns)
    shown = rows if everything else _without_old(rows, clock.now())
    if not shown:
        say(_none(scope))
    else:
        _print(shown, clock.now())
    _say_hidden(rows, shown, clock.now())


def print_jobs(run_root: str | None, place: "Place | None") -> None:
    """Print the table of `list` once, as a dashboard without keys."""
    from orchestrator.app.fleet.known_jobs import Scope
    from orchestrator.app.fleet.summaries import Reader
    from orchestrator.system import SystemClock

    scope, clock = Scope(run_root=run_root, place=place), SystemClock()
    rows = _without_old(_rows(scope, frozenset(), Reader(os.environ, clock)), clock.now())
    if rows:
        _print(rows, clock.now())
    else:
        say(_none(scope))


def _rows(scope: "Scope", states: frozenset[str], reader: "Reader") -> "list[JobRow]":
    """The rows in order. Prints a warning for each cluster that could not be asked."""
    from orchestrator.app import remote
    from orchestrator.app.fleet.known_jobs import known_jobs
    from orchestrator.dashboard.fleet.row import in_order
    from orchestrator.dashboard.status import stale_reasons

    jobs = known_jobs(scope, reader.environ, reader.clock, reader.crew)
    remote.refresh_all([job.found for job in jobs if job.found is not None])
    rows, unknown = reader.rows(jobs)
    lost = [job.found.stale.message for job in jobs if job.found and job.found.stale]
    for warning in dict.fromkeys(stale_reasons(unknown) or lost):
        warn(warning)
    return in_order((row for row in rows if not states or row.state in states), reader.clock.now())


def _without_old(rows: "Sequence[JobRow]", now: float) -> "list[JobRow]":
    from orchestrator.dashboard.fleet.row import is_old

    return [row for row in rows if not row.gone and not is_old(row, now)]


def _none(scope: "Scope") -> str:
    from orchestrator.job_paths import run_root_of

    if scope.place is not None:
        return "no jobs in that namespace"
    if scope.run_root is None:
        return "no jobs; `ndctl list --all` also shows old and archived ones"
    return f"no jobs in {run_root_of(scope.run_root, os.environ).absolute()}"


def _say_hidden(rows: "Sequence[JobRow]", shown: "Sequence[JobRow]", now: float) -> None:
    if len(shown) == len(rows):
        return
    gone = [row.name for row in rows if row.gone]
    older = len(rows) - len(shown) - len(gone)
    if older:
        say(f"note: {older:,} that ended more than 7 days ago: `ndctl list --all`", err=True)
    if gone:
        names = ", ".join(gone[:5]) + (f" and {len(gone) - 5:,} more" if len(gone) > 5 else "")
        say(
            f"note: {len(gone):,} registered without a run directory here: {names};"
            " `ndctl list --state GONE` says why",
            err=True,
        )


def _width() -> int | None:
    """Cells of the terminal; None if the output goes elsewhere."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def print_table(
    lines_at: "Callable[[int | None], Sequence[Line]]", height: int = sys.maxsize
) -> None:
    """Print a table as wide as the terminal, at most `height` lines of it."""
    lines = lines_at(_width())
    for line in lines[:height]:
        say_line((piece.text, piece.look) for piece in line)
    if len(lines) > height:
        say(f"… and {len(lines) - height:,} more")


def _print(rows: "Sequence[JobRow]", now: float, height: int = sys.maxsize) -> None:
    from orchestrator.dashboard.fleet.table import table

    print_table(lambda width: table(rows, now, width), height)


def _watch(scope: "Scope", states: frozenset[str], reader: "Reader") -> None:
    from orchestrator.dashboard.format import date_time

    try:
        while True:
            rows = _rows(scope, states, reader)
            now = reader.clock.now()
            shown = rows if scope.archived else _without_old(rows, now)
            click.clear()
            say(f"{len(shown):,} jobs, {date_time(now, None)}; Ctrl-C ends")
            _print(shown, now, shutil.get_terminal_size().lines - 3)
            reader.clock.sleep(WATCH_S)
    except KeyboardInterrupt:
        sys.exit(130)


@click.command(
    epilog="Example: ndctl wait quickstart --timeout 2h && ndctl submit next.yaml\n\n"
    "Exit codes: 0 all succeeded, or are in a state of --for; 1 failed; 7 cancelled; 5 succeeded"
    " without the state of --for; 124 timed out."
)
@jobs_argument
@click.option(
    "--for",
    "states",
    multiple=True,
    callback=_states,
    metavar="STATE",
    help="Wait for this state; several: RUNNING,RECOVERING.  [the end]",
)
@click.option(
    "--timeout", "timeout_s", callback=time_span, metavar="SPAN", help="90s, 10m, 12h.  [none]"
)
@root_option
@place_options
def wait(
    jobs: tuple[str, ...],
    states: frozenset[str],
    timeout_s: float | None,
    run_root: str | None,
    place: "Place | None",
) -> None:
    """Wait until jobs have ended, or are in a given state. Ctrl-C leaves them running."""
    from typing import cast

    from orchestrator.app.fleet.waiting import wait_for
    from orchestrator.job.stage import ENDED, State
    from orchestrator.system import SystemClock

    found = [one for one, _ in find_all(jobs, run_root, place)]
    wanted = cast("frozenset[State]", states or frozenset(ENDED))
    try:
        sys.exit(wait_for(found, wanted, timeout_s, os.environ, SystemClock(), say))
    except KeyboardInterrupt:
        sys.exit(130)


@click.command(epilog="Example: ndctl prune 'sweep-*' --older-than 7d --state FAILED,CANCELLED")
@click.argument("patterns", metavar="[PATTERN]...", nargs=-1, shell_complete=complete_job)
@click.option(
    "--older-than",
    "older_than_s",
    default="30d",
    callback=time_span,
    metavar="AGE",
    help="Only runs that ended so long ago: 12h, 30d, 8w.  [30d]",
)
@state_option
@click.option("--checkpoints", is_flag=True, help="Also remove checkpoints and your own files.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@root_option
def prune(
    patterns: tuple[str, ...],
    older_than_s: float,
    states: frozenset[str],
    checkpoints: bool,
    yes: bool,
    run_root: str | None,
) -> None:
    """Remove what your old runs left on disk, also archived ones.

    Shows what would be removed, and asks. A run with checkpoints loses only logs, traces and
    copies, so that it can be resumed. Runs that did not end, and those of others, stay.
    """
    from orchestrator.app.fleet.known_jobs import Scope, known_jobs
    from orchestrator.app.fleet.pruning import prunable, words_of
    from orchestrator.app.fleet.pruning import prune as remove
    from orchestrator.app.fleet.summaries import Reader
    from orchestrator.dashboard.format import count, size
    from orchestrator.system import SystemClock

    clock = SystemClock()
    jobs = known_jobs(Scope(patterns=patterns, run_root=run_root, archived=True), os.environ, clock)
    rows, _ = Reader(os.environ, clock).rows(jobs)
    rows = [row for row in rows if not states or row.state in states]
    found = prunable(jobs, rows, older_than_s, clock.now(), checkpoints=checkpoints)
    if not found:
        say("nothing to remove")
        return
    for one in found:
        say(f"{size(one.num_bytes):>12}  {words_of(one)}")
    total = f"{size(sum(one.num_bytes for one in found))} of {count(len(found), 'run')}"
    if not yes and not sys.stdin.isatty():
        say(f"nothing was removed; to remove {total}, add --yes")
        return
    if not yes and not click.confirm(f"Remove {total}?"):
        return
    error = remove(found, os.environ, say)
    if error is not None:
        raise error
