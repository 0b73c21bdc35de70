"""The command line: parse, call `app`, print, exit.

This module and the modules of the commands import only click at the top. Each command imports
the rest when it runs, so that `ndctl --help` stays fast.
"""

import os
import sys
from errno import ENOSPC
from io import TextIOWrapper
from typing import TYPE_CHECKING

import click

from orchestrator.cli import (
    controlling,
    fleet,
    forecasting,
    inside,
    jobs,
    launch,
    machines,
    own_program,
    plans,
    policies,
    serving,
    simulating,
    snapshots,
)
from orchestrator.cli.options import say_error
from orchestrator.cli.specs import explaining, starting
from orchestrator.cli.usage.sections import INTERRUPTED, Sections
from orchestrator.contract.visible import VisibleStream

if TYPE_CHECKING:
    from orchestrator.errors import NdctlError

EXIT_CODES = (
    "Exit codes: 0 success, 1 the job failed, 2 usage, 3 bad spec, 4 no plan, 5 job state,"
    " 6 backend, 7 cancelled, 130 interrupted."
)
UNFORGIVING = ("strict", "surrogateescape")
"""Error handlers of a stream with which a character that its encoding lacks is an error."""

SECTIONS = {
    "Start a job": (
        own_program.run,
        launch.submit,
        starting.init,
        explaining.explain,
        plans.validate,
        plans.plan,
        launch.render,
        machines.doctor,
        machines.calibrate,
        plans.inventory,
    ),
    "Look at jobs": (
        fleet.list_jobs,
        jobs.status,
        jobs.dashboard,
        jobs.describe,
        jobs.events,
        jobs.logs,
        jobs.diagnose,
        snapshots.snapshot,
        snapshots.profile,
        snapshots.report,
    ),
    "Act on jobs": (fleet.wait, snapshots.exec_, jobs.cancel, fleet.prune),
    "Hosts and failures": (machines.hosts, policies.policy, policies.classify),
    "Look ahead": (forecasting.forecast, simulating.simulate),
    "For other programs": (serving.serve, explaining.schema, inside.agent, controlling.controller),
}
"""All commands, as `--help` groups them: first what a newcomer needs first."""


@click.group(
    cls=Sections,
    sections=SECTIONS,
    epilog=EXIT_CODES,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(package_name="ndctl")
def cli() -> None:
    """Plan, place, launch and supervise n-dimensional parallel training jobs.

    First steps: `ndctl run -- train.py` for your own program, `ndctl submit SPEC --follow` for a
    job spec. `ndctl COMMAND --help` has an example of each command.
    """


def main() -> None:
    """Entry point. Prints an NdctlError as one message and exits with its exit code."""
    _open_streams()
    # `say` escapes control characters. This does the same for text that `say` does not print:
    # errors of click, log lines, tracebacks.
    sys.stderr = VisibleStream(sys.stderr)
    try:
        cli(prog_name="ndctl")
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)  # before or after the command itself, which says what it did
    except Exception as exc:
        error = _explained(exc)
        if error is None:
            raise
        say_error(str(error))
        sys.exit(error.exit_code)


def _explained(exc: Exception) -> "NdctlError | None":
    """The error that the user can act on; None: a crash of ndctl."""
    from ndctl.rank.regular_file import NotRegular
    from orchestrator.errors import NdctlError
    from orchestrator.posix.denied import denied, not_a_file

    match exc:
        case NdctlError():
            return exc
        # A file that the user may not read is a mistake to explain, not a crash of ndctl.
        case PermissionError() if exc.filename is not None:
            return denied(exc)
        case NotRegular():
            return not_a_file(exc)
        case FileNotFoundError() if exc.filename is None and not _has_folder():
            said = "the current folder was removed, and a relative path needs it"
            return NdctlError(said, fix="change to another folder (cd), and run the command again")
        case OSError() if exc.errno == ENOSPC and exc.filename is None:
            # Python would try to write the rest when it exits.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            said = f"cannot write standard output: {exc.strerror}"
            return NdctlError(said, fix="write it to a file on a disk with free space")
    return None


def _has_folder() -> bool:
    try:
        os.getcwd()  # noqa: PTH109 - pathlib is not imported yet
    except FileNotFoundError:
        return False
    return True


def _open_streams() -> None:
    """Open /dev/null in place of standard streams that are closed (`ndctl list >&-`). The next file
    would get the descriptor, and text for the terminal would be written to it."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    sys.stdin = sys.stdin or open(0)  # noqa: SIM115 - a descriptor, for the whole process
    sys.stdout = sys.stdout or open(1, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w")  # noqa: SIM115
    # Names, logs and the graphs of a dashboard have characters that the encoding of a locale may
    # lack. Each is an error where Python opens the stream as `strict` (ISO-8859-1), and also as
    # `surrogateescape` (POSIX), which only passes on bytes of file names; `visible` writes those
    # out.
    if isinstance(sys.stdout, TextIOWrapper) and sys.stdout.errors in UNFORGIVING:
        sys.stdout.reconfigure(errors="replace")
