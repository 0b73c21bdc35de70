"""The command line: parse, call `app`, print, exit.

This module and the modules of the commands import only click at the top. Each command imports
the rest when it runs, so that `ndctl --help` stays fast.
"""

import sys

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
from orchestrator.cli.options import say
from orchestrator.contract.visible import VisibleStream

EXIT_CODES = (
    "Exit codes: 0 success, 1 the job failed, 2 usage, 3 bad spec, 4 no plan, 5 job state,"
    " 6 backend, 7 cancelled, 130 interrupted."
)


@click.group(
    epilog=EXIT_CODES,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(package_name="ndctl")
def cli() -> None:
    """Plan, place, launch and supervise n-dimensional parallel training jobs."""


for _command in (
    plans.validate,
    plans.schema,
    plans.plan,
    plans.inventory,
    own_program.run,
    launch.submit,
    launch.render,
    inside.agent,
    fleet.list_jobs,
    jobs.status,
    jobs.describe,
    jobs.diagnose,
    snapshots.snapshot,
    snapshots.profile,
    jobs.logs,
    jobs.events,
    jobs.dashboard,
    fleet.wait,
    jobs.cancel,
    fleet.prune,
    serving.serve,
    machines.doctor,
    machines.hosts,
    policies.policy,
    policies.classify,
    simulating.simulate,
    forecasting.forecast,
    controlling.controller,
):
    cli.add_command(_command)


def main() -> None:
    """Entry point. Prints an NdctlError as one message and exits with its exit code."""
    # `say` escapes control characters. This does the same for text that `say` does not print:
    # errors of click, log lines, tracebacks.
    sys.stderr = VisibleStream(sys.stderr)
    try:
        cli(prog_name="ndctl")
    except Exception as exc:
        from orchestrator.errors import NdctlError
        from orchestrator.posix.denied import denied

        # A file that the user may not read is a mistake to explain, not a crash of ndctl.
        if isinstance(exc, PermissionError) and exc.filename is not None:
            exc = denied(exc)
        if not isinstance(exc, NdctlError):
            raise
        say(f"error: {exc}", err=True)
        sys.exit(exc.exit_code)
