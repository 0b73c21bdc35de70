"""The end of the batch script, where srun did not end well.

srun alone can be killed on a node that lives, by its memory cgroup or by a person. What it started
goes on without it; without the script it would not. So this waits in the place of srun, and where
no agent is left that could, has the job queued again (`failover/requeue_after_exit.py`).

scancel and a requeue end the script by SIGTERM, before it comes here or while it is here.
"""

import argparse
import logging
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from orchestrator.backends.by_name import backend_named
from orchestrator.backends.entry.slurm_task import log_to
from orchestrator.backends.slurm.commands import Slurm
from orchestrator.backends.slurm.job_lookup import own_id
from orchestrator.backends.slurm.on_nodes import srun_end
from orchestrator.contract.files.leader_file import Term
from orchestrator.contract.files.run_dir import RunDir
from orchestrator.errors import BackendError
from orchestrator.failover.requeue_after_exit import see_to_the_job
from orchestrator.seams import Clock, Shell
from orchestrator.system import SystemClock, log_to_stderr, run_command

log = logging.getLogger(__name__)

SOON_S = 1.0
"""Between the first two looks at the steps; each next pause is twice as long, …"""
LOOK_S = 8.0
"""… and from this on they go on without srun, which may be for days."""


def main(argv: Sequence[str], environ: Mapping[str, str], clock: Clock, shell: Shell) -> int:
    args = _parser().parse_args(argv)
    run_dir = RunDir(args.run_dir)
    host = environ.get("SLURMD_NODENAME") or socket.gethostname()
    log_to(run_dir.agent_log(host))
    log_to_stderr()
    ended_at = clock.now()
    await_agents(Slurm(shell, clock), environ, args.code)
    named = partial(backend_named, environ=environ, clock=clock, shell=shell)
    term = Term(args.launch, int(environ.get("SLURM_RESTART_COUNT", "0")))
    srun_end.write_down(
        srun_end.note(run_dir.path, term.launch, term.restarts), host, args.code, ended_at
    )
    return see_to_the_job(run_dir, term, args.code, named, clock)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="orchestrator.backends.entry.slurm_after_srun")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--launch", type=int, required=True)
    parser.add_argument("--code", type=int, required=True, help="of srun")
    return parser


def await_agents(slurm: Slurm, environ: Mapping[str, str], code: int) -> None:
    """Until no step of the job is left: when srun is killed alone, it mostly has the step ended."""
    pause = SOON_S
    while steps := _steps(slurm, environ):
        if pause == LOOK_S:
            log.warning("srun ended with code %s, and %s goes on without it", code, steps[0])
        slurm.clock.sleep(pause)
        pause *= 2 if pause <= LOOK_S else 1


def _steps(slurm: Slurm, environ: Mapping[str, str]) -> Sequence[str]:
    """Not known is as good as that they go on: nothing is lost by it."""
    try:
        listed = slurm.told(["squeue", "-h", "-s", "-j", own_id(environ) or "", "-o", "%i"])
    except BackendError as exc:
        log.warning("whether any agent is left is not known: %s", exc)
        return ("perhaps a step",)
    return parse_steps(listed, own=environ.get("SLURM_STEP_ID", ""))


def parse_steps(text: str, own: str) -> tuple[str, ...]:
    """Of `squeue -s -o %i`: what srun started, without what Slurm itself keeps beside it (as
    `7.batch`), and without the step in which this runs."""
    steps = (line.strip() for line in text.splitlines())
    numbers = ((step, step.rpartition(".")[2]) for step in steps)
    return tuple(f"step {step}" for step, number in numbers if number.isdigit() and number != own)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], dict(os.environ), SystemClock(), run_command))
