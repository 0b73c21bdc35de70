"""The queue of the local backend: one process for each job that waits for others (`--after`).

It holds the lock of the job's journal, as a leader does, so the job counts as alive and cannot be
submitted again. It also holds the lock of an agent, so whatever ends the job's agents ends it too.
"""

import argparse
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from orchestrator.app.cancel_job import record_cancel
from orchestrator.backends.local import QUEUE, LocalBackend
from orchestrator.contract.files import exit_codes
from orchestrator.contract.files.run_dir import RunDir
from orchestrator.journal.snapshot import replay
from orchestrator.posix.locks import try_lock
from orchestrator.seams import Clock
from orchestrator.system import SystemClock, log_to_stderr

log = logging.getLogger("orchestrator.backends.entry.local_queue")

POLL_S = 0.5


def main(argv: Sequence[str], environ: Mapping[str, str], clock: Clock) -> int:
    parser = argparse.ArgumentParser(prog="orchestrator.backends.entry.local_queue")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--launch", type=int, required=True)
    parser.add_argument("--lock", type=int, help="descriptor of its lock, if it was taken")
    args = parser.parse_args(argv)
    log_to_stderr()
    run_dir = RunDir(args.run_dir)
    lock = args.lock if args.lock is not None else _opened(run_dir.agent_lock(QUEUE))
    os.set_inheritable(lock, False)
    journal = _opened(run_dir.journal)
    for fd in (lock, journal):
        _take(fd, clock)
    os.ftruncate(lock, 0)
    os.pwrite(lock, str(os.getpid()).encode(), 0)
    run = replay(run_dir)
    # A cancel, or a newer submission, came before the locks were taken.
    if run.job is None or run.ending is not None or run.job.launch.launch != args.launch:
        log.info("the job does not wait any more")
        return exit_codes.OK
    failed = wait_for(run.job.launch.after, clock)
    os.close(journal)  # for the leader; the lock shows until the end that the job starts
    if failed:
        log.info("the job is cancelled: %s", failed)
        record_cancel(run_dir, f"ndctl, because {failed}", clock)
        return exit_codes.OK
    log.info("all jobs succeeded; starting the agents")
    LocalBackend(environ, clock).start(run.job.launch)
    return exit_codes.OK


def wait_for(jobs: Sequence[str], clock: Clock) -> str:
    """Return when all jobs have succeeded, with an empty text, or when one never will, with what
    happened to it."""
    waiting = [RunDir(Path(job)) for job in jobs]
    while waiting:
        for one in (*waiting,):
            state = _ending(one)
            if state == "SUCCEEDED":
                log.info("%s succeeded", one.path.name)
                waiting.remove(one)
            elif state is not None:
                return f"{one.path.name} {state}"
        if waiting:
            clock.sleep(POLL_S)
    return ""


def failed_of(jobs: Sequence[str]) -> str:
    """What happened to the first of these jobs that ended without success; empty: none did. A job
    that was removed since may have succeeded."""
    for job in map(Path, jobs):
        run = replay(RunDir(job))
        if run.ending not in (None, "SUCCEEDED"):
            return f"{job.name} ended as {run.ending}"
    return ""


def _ending(job: RunDir) -> str | None:
    if not job.journal.exists():
        return "was removed"
    run = replay(job)
    if run.ending is None or run.ending == "SUCCEEDED":
        return run.ending
    return f"ended as {run.ending}"


def _opened(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT, 0o644)


def _take(fd: int, clock: Clock) -> None:
    """Wait for the lock: readers take it for a moment."""
    while not try_lock(fd):
        clock.sleep(POLL_S / 10)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ, SystemClock()))
