"""The start of the batch script: makes the run directory, or ends where the name is taken.

`ndctl submit` has made it, and the script of a job that is queued again finds it as it was; for a
script that a person gave to sbatch it is made here. What the script carries of the job is read from
standard input; an element of a job array is a job of its own, with its number behind its name.
"""

import argparse
import contextlib
import logging
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from orchestrator.backends.slurm import render
from orchestrator.backends.slurm.backend import SlurmBackend
from orchestrator.backends.slurm.on_nodes import embedded
from orchestrator.contract.files import exit_codes
from orchestrator.contract.files.run_dir import RunDir
from orchestrator.contract.spec.job_spec import NAME
from orchestrator.contract.submission_payload import Handover, renamed
from orchestrator.errors import JobError, NdctlError, Unanswered
from orchestrator.journal.current_launch import counting
from orchestrator.journal.run_dir_init import ARCHIVE, begin, is_of
from orchestrator.journal.snapshot import known
from orchestrator.posix.locks import try_lock
from orchestrator.posix.retry_io import once_it_serves
from orchestrator.seams import Clock, Shell
from orchestrator.system import SystemClock, log_to_stderr, run_command

log = logging.getLogger("ndctl")

RETRY_S = 5.0
LOCK_S = 120.0
"""For another process that submits or begins a job of this name, and asks Slurm about it."""
LOCK_POLL_S = 0.2

T = TypeVar("T")


def main(
    argv: Sequence[str], text: str, environ: Mapping[str, str], clock: Clock, shell: Shell
) -> int:
    args = _parser().parse_args(argv)
    log_to_stderr()
    try:
        handover = _read(text, args.run_dir)
        begin_here(handover, environ, clock, shell)
    except NdctlError as exc:
        sys.stderr.write(f"ndctl: {exc}\n")
        return exc.exit_code
    except OSError as exc:
        sys.stderr.write(f"ndctl: the run directory cannot be written: {exc}\n")
        return exit_codes.BACKEND
    _keep(args.script, render.script_path(handover.launch))
    return exit_codes.OK


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="orchestrator.backends.entry.slurm_before_srun")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--script", type=Path, help="the batch script, to be kept")
    return parser


def _read(text: str, run_dir: Path) -> Handover:
    """Raises SpecError and JobError."""
    handover = embedded.from_text(text)
    if not NAME.admits(run_dir.name) or not run_dir.is_absolute():
        raise JobError(
            f"{run_dir} cannot be the run directory of a job: its name is not {NAME}",
            fix="give the job another name, a shorter one for an array, and render it again",
        )
    if "%" in str(run_dir):
        raise JobError(
            f"{run_dir} cannot be a run directory on Slurm, which replaces % in names of files",
            fix="render it again with another --run-root",
        )
    return renamed(handover, run_dir)


def begin_here(handover: Handover, environ: Mapping[str, str], clock: Clock, shell: Shell) -> None:
    """See to it that the run directory has this launch, and that this Slurm job is it.

    Raises:
        JobError: another job has the name, or this allocation is none for it.
        BackendError: Slurm refuses what is asked of it.
        OSError: the run directory cannot be made.
    """
    backend, launch = SlurmBackend(environ, clock, shell), handover.launch
    run_dir = RunDir(Path(launch.run_dir))
    _check_nodes(handover, environ)
    _once_answered(partial(backend.take_allocation, launch), clock)
    restarts = int(environ.get("SLURM_RESTART_COUNT", "0"))
    looking = partial(_has_begun, run_dir, handover, backend, restarts, clock)
    look = partial(once_it_serves, looking, "the run directory cannot be read", clock)
    if not look():
        with _alone(run_dir, clock):
            if not look():  # nor while the lock was waited for
                beginning = partial(begin, run_dir, handover, clock, token=True)
                once_it_serves(beginning, "there is no room for the run directory", clock)
                backend.record(launch)
                log.info("job %s begins in %s", launch.job, run_dir.path)
    making = partial(backend.make_folder, launch)
    once_it_serves(making, "there is no room in the run directory", clock)


def _check_nodes(handover: Handover, environ: Mapping[str, str]) -> None:
    if not environ.get("SLURM_JOB_ID"):
        raise JobError(
            "this is the batch script of a Slurm job, and runs in none",
            fix="give it to sbatch; `ndctl submit SPEC --backend local` trains on this machine",
        )
    if environ.get("SLURM_HET_SIZE"):
        raise JobError(
            f"Slurm job {environ['SLURM_JOB_ID']} is heterogeneous: where a node of its second"
            " component is lost, Slurm queues that component again alone, and cannot start it",
            fix="give the script to sbatch without `:` and `#SBATCH hetjob`; spare hosts are asked"
            " for by cluster.spare_hosts",
        )
    job = handover.job
    least = job.min_hosts if job.shrink else len(job.plan.hosts)
    nodes = int(environ.get("SLURM_JOB_NUM_NODES", least))
    if nodes < least:
        raise JobError(
            f"Slurm job {environ['SLURM_JOB_ID']} has {nodes} of the {least} nodes that the plan"
            " is for",
            fix="leave --nodes as it is in the script, or set cluster.hosts and render it again",
        )


def _has_begun(
    run_dir: RunDir, handover: Handover, backend: SlurmBackend, restarts: int, clock: Clock
) -> bool:
    """Whether the newest launch of the run directory is this very one, and this allocation's.

    Raises JobError where it is another's.
    """
    counts, launch = counting(run_dir), handover.launch
    if counts is None or counts.launch.launch != launch.launch:
        return False  # whether this one may come after it, `begin` says
    if restarts and backend.is_recorded(launch):
        return True  # Slurm has started it again; the journal of weeks is for its leader to read
    run = known(run_dir)
    if run.job is None:
        return False  # its submission was killed before it wrote the journal
    if run.ending is not None or not is_of(run_dir, handover, run):
        again = _command(run_dir, "submit", str(run_dir.spec), "--resume")
        raise JobError(
            f"job {launch.job} exists in {run_dir.path}: {run.state}, {run.stage.reason}",
            fix=f"go on with that one: `{again}`; or start over, with --new instead of --resume,"
            f" which keeps the old run in {ARCHIVE}/; or give this one another name:"
            " `ndctl render SPEC --set name=…`",
        )
    rival = _once_answered(partial(backend.rival, launch), clock)
    if rival is not None:
        raise JobError(
            f"job {launch.job} exists in {run_dir.path}: {rival}",
            fix=f"end that one: `{_command(run_dir, 'cancel', launch.job)}`; or give this one"
            " another name: `ndctl render SPEC --set name=…`",
        )
    return True


def _command(run_dir: RunDir, *words: str) -> str:
    return shlex.join(["ndctl", *words, "--run-root", str(run_dir.path.parent)])


def _once_answered(ask: Callable[[], T], clock: Clock) -> T:
    while True:
        try:
            return ask()
        except Unanswered as exc:
            log.error("nothing begins before Slurm answers, asking again: %s", exc)
            clock.sleep(RETRY_S)


@contextlib.contextmanager
def _alone(run_dir: RunDir, clock: Clock) -> Iterator[None]:
    """Be the only one that submits or begins a job of this name. Raises JobError and OSError."""
    path, begun = run_dir.submission_lock, clock.monotonic()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        while not try_lock(file.fileno()):
            if clock.monotonic() - begun > LOCK_S:
                raise JobError(
                    f"job {run_dir.path.name} is being submitted by another process, which holds"
                    f" {path}",
                    fix="give it to sbatch again once that has ended",
                )
            clock.sleep(LOCK_POLL_S)
        yield


def _keep(script: Path | None, place: Path) -> None:
    """A copy of what runs, for who looks later; the script lies with slurmd."""
    if script is None or place.exists():
        return
    with contextlib.suppress(OSError):  # in a container it is not to be seen
        shutil.copyfile(script, place)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], sys.stdin.read(), dict(os.environ), SystemClock(), run_command))
