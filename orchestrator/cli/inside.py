"""`ndctl agent`: the agent of one node in a Slurm allocation."""

import os
import signal
import sys

import click

from orchestrator.cli.options import root_option, say, set_option, spec_argument


@click.command(
    epilog="Example: ndctl agent job.yaml   in a batch script, below: srun --ntasks-per-node=1"
    " --no-kill --kill-on-bad-exit=0 --wait=0 --cpu-bind=none"
)
@spec_argument
@set_option
@root_option
@click.option("--resume", is_flag=True, help="Resume the run that ended or was interrupted.")
@click.option("--new", is_flag=True, help="Start over. The old run is moved to .archive/.")
def agent(
    spec: str, overrides: tuple[str, ...], run_root: str | None, resume: bool, new: bool
) -> None:
    """Run the agent of this node in a Slurm allocation. Start it with srun on each node.

    For your own batch scripts (docs/slurm.md). The first node plans, creates the run directory and
    leads. The batch job is requeued at its time limit, and without nodes that were lost.
    """
    # Slurm may signal the time limit before the agent has its handlers. The default action of
    # these signals would end the process.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    from pathlib import Path

    from orchestrator.app.submission.inside import (
        Wanted,
        agent_command,
        end_step,
        wait_for_first_task,
    )
    from orchestrator.errors import NdctlError
    from orchestrator.system import SystemClock, log_to_stderr, run_command

    if resume and new:
        raise click.UsageError("use either --resume or --new, not both")
    log_to_stderr()
    wanted = Wanted(spec=Path(spec), overrides=overrides, run_root=run_root, resume=resume, new=new)
    try:
        command = agent_command(wanted, os.environ, SystemClock(), run_command)
    except NdctlError as exc:
        wait_for_first_task(os.environ, SystemClock())
        say(f"error: {exc}", err=True)
        end_step(os.environ, run_command)
        sys.exit(exc.exit_code)
    if command.umask is not None:
        os.umask(command.umask)
    os.execve(command.argv[0], command.argv, command.environ)
