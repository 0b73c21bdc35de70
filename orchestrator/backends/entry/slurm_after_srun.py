"""The end of the batch script after srun failed.

srun can be killed alone, by its memory cgroup or by a person. Its agents continue without it, but
only as long as the batch script runs. So this program waits for them. If no agent is left to
requeue the job, it requeues the job (`failover/requeue_after_exit.py`).

scancel and a requeue end the script by SIGTERM, before or during this program.
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
"""Seconds between the first two queries of steps; each pause is twice as long as the last, …"""
LOOK_S = 8.0
"""… up to this. From then on the agents run without srun, maybe for days."""


def main(argv: Sequence[str], environ: Mapping[str, str], clock: Clock, shell: Shell) -> int:
    args = _parser().parse_args(argv)
    run_dir = RunDir(args.run_dir)
    host = environ.get("SLURMD_NODENAME") or socket.gethostname()
    log_to(run_dir.agent_log(host))
    log_to_stderr()
    ended_at = clock.now()
    term = Term(args.launch, int(environ.get("SLURM_RESTART_COUNT", "0")))
    # First, because this program logs to the same file.
    step = srun_end.step_end(run_dir.path, term.launch, environ, args.batch_output)
    await_agents(Slurm(shell, clock), environ, args.code)
    named = partial(backend_named, environ=environ, clock=clock, shell=shell)
    note = srun_end.note(run_dir.path, term.launch, term.restarts)
    srun_end.write_down(note, host, args.code, ended_at, step)
    said = srun_end.last_errors(args.batch_output) if args.batch_output else ""
    return see_to_the_job(run_dir, term, args.code, said, named, clock)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="orchestrator.backends.entry.slurm_after_srun")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--launch", type=int, required=True)
    parser.add_argument("--code", type=int, required=True, help="exit code of srun")
    parser.add_argument(
        "--batch-output", type=Path, help="file with the errors of the batch script and of srun"
    )
    return parser


def await_agents(slurm: Slurm, environ: Mapping[str, str], code: int) -> None:
    """Wait until no step of the job is left. Slurm usually ends the step if srun is killed."""
    pause = SOON_S
    while steps := _steps(slurm, environ):
        if pause == LOOK_S:
            log.warning("srun exited with code %s, but %s continues without it", code, steps[0])
        slurm.clock.sleep(pause)
        pause *= 2 if pause <= LOOK_S else 1


def _steps(slurm: Slurm, environ: Mapping[str, str]) -> Sequence[str]:
    """The steps of the job. If they are unknown, assume that there are some and wait."""
    try:
        listed = slurm.told(["squeue", "-h", "-s", "-j", own_id(environ) or "", "-o", "%i"])
    except BackendError as exc:
        log.warning("failed to list the steps of the job: %s", exc)
        return ("an unknown step",)
    return parse_steps(listed, own=environ.get("SLURM_STEP_ID", ""))


def parse_steps(text: str, own: str) -> tuple[str, ...]:
    """Parse `squeue -s -o %i`: steps of srun, without Slurm's own (such as `7.batch`) and without
    the step of this process."""
    steps = (line.strip() for line in text.splitlines())
    numbers = ((step, step.rpartition(".")[2]) for step in steps)
    return tuple(f"step {step}" for step, number in numbers if number.isdigit() and number != own)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], dict(os.environ), SystemClock(), run_command))
