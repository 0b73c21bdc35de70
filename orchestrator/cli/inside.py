"""Inside of an allocation: `agent`."""

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
@click.option("--resume", is_flag=True, help="Go on with the run that ended or was cut off.")
@click.option("--new", is_flag=True, help="Start over; the old run is kept in .archive/.")
def agent(
    spec: str, overrides: tuple[str, ...], run_root: str | None, resume: bool, new: bool
) -> None:
    """On Slurm, started by srun on each node: be the agent of a job in this allocation.

    For batch scripts of your own (docs/slurm.md): the first node plans, makes the run directory and
    leads; the batch job is queued again at its time limit and without nodes that were lost.
    """
    # Slurm's notice of the time limit must not end what does not listen for it yet.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    from pathlib import Path

    from orchestrator.app.submission.inside import (
        Wanted,
        agent_command,
        end_step,
        let_the_first_speak,
    )
    from orchestrator.errors import NdctlError
    from orchestrator.system import SystemClock, log_to_stderr, run_command

    if resume and new:
        raise click.UsageError("--resume and --new exclude each other")
    log_to_stderr()
    wanted = Wanted(spec=Path(spec), overrides=overrides, run_root=run_root, resume=resume, new=new)
    try:
        command = agent_command(wanted, os.environ, SystemClock(), run_command)
    except NdctlError as exc:
        let_the_first_speak(os.environ, SystemClock())
        say(f"error: {exc}", err=True)
        end_step(os.environ, run_command)
        sys.exit(exc.exit_code)
    if command.umask is not None:
        os.umask(command.umask)
    os.execve(command.argv[0], command.argv, command.environ)
