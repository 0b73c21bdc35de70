"""End the processes that the agent of this host left. An agent of another host starts this step
before it takes over from the leader of this host (`failover/takeover.py`).

A leader that is stopped by a signal keeps the lock of the journal, and its ranks may continue.
Killing it also ends its ranks, and locks show what is left. If this step runs at all, the host is
healthy: slurmd starts programs, and the file system of the run directory is mounted.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from orchestrator.backends.host_processes import await_free, end_holder, pid_in, state_of
from orchestrator.contract.files import exit_codes
from orchestrator.contract.files.run_dir import RunDir
from orchestrator.errors import BackendError
from orchestrator.seams import Clock
from orchestrator.system import SystemClock


def main(argv: Sequence[str], clock: Clock) -> int:
    parser = argparse.ArgumentParser(prog="orchestrator.backends.entry.slurm_clear_host")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--host", required=True)
    args = parser.parse_args(argv)
    try:
        sys.stdout.write(clear(RunDir(args.run_dir), args.host, clock) + "\n")
    except (BackendError, OSError) as exc:
        sys.stderr.write(f"failed to clear {args.host}: {exc}\n")
        return exit_codes.FAILED
    return exit_codes.OK


def clear(run_dir: RunDir, host: str, clock: Clock) -> str:
    """End what is left of the agent of `host`. Returns what was left, as text.

    Raises:
        BackendError: a process does not exit.
        OSError: its locks cannot be read.
    """
    lock = run_dir.agent_lock(host)
    pid = pid_in(lock)
    state = state_of(pid)
    ended = end_holder(lock, clock, leave_s=0.0)
    await_free(run_dir.ranks_lock(host), clock)
    if ended is None:
        return f"its process on {host} had exited, and {host} is healthy"
    return f"its process {ended} on {host} still existed ({state}) and was killed"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], SystemClock()))
