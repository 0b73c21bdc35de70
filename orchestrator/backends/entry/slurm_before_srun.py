"""The start of the batch script: create the run directory, or exit if the job name is taken.

After `ndctl submit` and after a requeue the run directory exists. For a script that a person gave
to sbatch, it is created here. Standard input has the job from the script. Each array task is a
separate job with its number in the name.
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
from orchestrator.backends.slurm.on_nodes import embedded, program_copy
from orchestrator.contract.files import exit_codes
from orchestrator.contract.files.run_dir import RunDir
from orchestrator.contract.spec.job_spec import NAME
from orchestrator.contract.submission_payload import Handover, renamed
from orchestrator.errors import JobError, NdctlError, Unanswered
from orchestrator.journal.current_launch import current_launch
from orchestrator.journal.run_dir_init import ARCHIVE, begin, is_same_launch
from orchestrator.journal.snapshot import replay
from orchestrator.posix.locks import try_lock
from orchestrator.posix.retry_io import retry_io
from orchestrator.registry.submitted import register_job
from orchestrator.seams import Clock, Shell
from orchestrator.system import SystemClock, log_to_stderr, run_command

log = logging.getLogger("ndctl")

RETRY_S = 5.0
LOCK_S = 120.0
"""Time for another process that submits a job of this name."""
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
        sys.stderr.write(f"ndctl: cannot write the run directory: {exc}\n")
        return exit_codes.BACKEND
    _keep(args.script, render.script_path(handover.launch))
    return exit_codes.OK


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="orchestrator.backends.entry.slurm_before_srun")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--script", type=Path, help="path of the batch script, which is copied")
    return parser


def _read(text: str, run_dir: Path) -> Handover:
    """Raises SpecError and JobError."""
    handover = embedded.from_text(text)
    if not NAME.admits(run_dir.name) or not run_dir.is_absolute():
        raise JobError(
            f"{run_dir} cannot be a run directory: its name must be {NAME}",
            fix="give the job another name (a shorter one for an array), and render it again",
        )
    if "%" in str(run_dir):
        raise JobError(
            f"{run_dir} cannot be a run directory on Slurm, which replaces % in file names",
            fix="render it again with another --run-root",
        )
    return renamed(handover, run_dir)


def begin_here(handover: Handover, environ: Mapping[str, str], clock: Clock, shell: Shell) -> None:
    """Make sure that the run directory has this launch, recorded with this Slurm job.

    Raises:
        JobError: another job has the name, or this allocation is not suitable.
        BackendError: Slurm refuses a command.
        OSError: the run directory cannot be created.
    """
    backend, launch = SlurmBackend(environ, clock, shell), handover.launch
    run_dir = RunDir(Path(launch.run_dir))
    _check_nodes(handover, environ)
    _once_answered(partial(backend.take_allocation, launch), clock)
    restarts = int(environ.get("SLURM_RESTART_COUNT", "0"))
    looking = partial(_has_begun, run_dir, handover, backend, restarts, clock)
    look = partial(retry_io, looking, "failed to read the run directory", clock)
    if not look():
        with _submission_lock(run_dir, clock):
            if not look():  # another process may have started it meanwhile
                program_copy.look(launch, handover.job.run, clock)
                beginning = partial(begin, run_dir, handover, clock, token=True)
                retry_io(beginning, "failed to create the run directory", clock)
                for warning in register_job(handover.job, run_dir.path, clock.now(), environ):
                    log.warning("%s", warning)
                backend.record(launch)
                log.info("starting job %s in %s", launch.job, run_dir.path)
    making = partial(backend.make_folder, launch)
    retry_io(making, "failed to write to the run directory", clock)


def _check_nodes(handover: Handover, environ: Mapping[str, str]) -> None:
    if not environ.get("SLURM_JOB_ID"):
        raise JobError(
            "this batch script must run in a Slurm job",
            fix="give it to sbatch, or train here with `ndctl submit SPEC --backend local`",
        )
    if environ.get("SLURM_HET_SIZE"):
        raise JobError(
            f"Slurm job {environ['SLURM_JOB_ID']} is heterogeneous: if it loses a node of its"
            " second component, Slurm requeues only that component and cannot start it",
            fix="give the script to sbatch without `:` and `#SBATCH hetjob`; for spare hosts set"
            " cluster.spare_hosts",
        )
    job = handover.job
    least = job.min_hosts if job.shrink else len(job.plan.hosts)
    nodes = int(environ.get("SLURM_JOB_NUM_NODES", least))
    if nodes < least:
        raise JobError(
            f"Slurm job {environ['SLURM_JOB_ID']} has {nodes} nodes, but the plan needs {least}",
            fix="keep --nodes of the script, or set cluster.hosts and render it again",
        )


def _has_begun(
    run_dir: RunDir, handover: Handover, backend: SlurmBackend, restarts: int, clock: Clock
) -> bool:
    """Whether the newest launch in the run directory is this one and belongs to this Slurm job.

    Raises:
        JobError: another job has the name.
    """
    counts, launch = current_launch(run_dir), handover.launch
    if counts is None or counts.launch.launch != launch.launch:
        return False  # `begin` checks whether this launch may follow
    if restarts and backend.is_recorded(launch):
        return True  # a requeue; the journal may be long, so only the leader reads it
    run = replay(run_dir)
    if run.job is None:
        return False  # the submission was killed before it wrote the journal
    if run.ending is not None or not is_same_launch(run_dir, handover, run):
        again = _command(run_dir, "submit", str(run_dir.spec), "--resume")
        raise JobError(
            f"job {launch.job} already exists in {run_dir.path}: {run.state}, {run.stage.reason}",
            fix=f"resume that job: `{again}`; or start over with --new instead of --resume, which"
            f" moves the old run to {ARCHIVE}/; or give this job another name: `ndctl render SPEC"
            " --set name=…`",
        )
    rival = _once_answered(partial(backend.rival, launch), clock)
    if rival is not None:
        raise JobError(
            f"job {launch.job} already exists in {run_dir.path}: {rival}",
            fix=f"cancel that job: `{_command(run_dir, 'cancel', launch.job)}`; or give this job"
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
            log.error("waiting for Slurm to answer: %s", exc)
            clock.sleep(RETRY_S)


@contextlib.contextmanager
def _submission_lock(run_dir: RunDir, clock: Clock) -> Iterator[None]:
    """Hold the submission lock of the job name. Raises JobError and OSError."""
    path, begun = run_dir.submission_lock, clock.monotonic()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        while not try_lock(file.fileno()):
            if clock.monotonic() - begun > LOCK_S:
                raise JobError(
                    f"job {run_dir.path.name} is being submitted by another process, which holds"
                    f" {path}",
                    fix="give the script to sbatch again when that process has ended",
                )
            clock.sleep(LOCK_POLL_S)
        yield


def _keep(script: Path | None, place: Path) -> None:
    """Copy the script to the run directory; slurmd deletes its own copy after the job."""
    if script is None or place.exists():
        return
    with contextlib.suppress(OSError):  # not visible in a container
        shutil.copyfile(script, place)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], sys.stdin.read(), dict(os.environ), SystemClock(), run_command))
