"""Ends what the agent of this host left of a run: a step that an agent of another host starts here,
before it takes over from the leader that was here (`failover/takeover.py`).

A leader that is merely stopped keeps the journal's lock, and its ranks may run on without it. The
kernel ends them with it, so what is left is seen by their locks. That this step runs at all shows
that the host is well: slurmd starts programs, and the file system of the run directory is there.
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
        sys.stderr.write(f"{args.host} cannot be cleared: {exc}\n")
        return exit_codes.FAILED
    return exit_codes.OK


def clear(run_dir: RunDir, host: str, clock: Clock) -> str:
    """In words, what was left of the agent of `host`. Raises BackendError where some of it does not
    end, and OSError where its locks cannot be looked at."""
    lock = run_dir.agent_lock(host)
    pid = pid_in(lock)
    state = state_of(pid)
    ended = end_holder(lock, clock, leave_s=0.0)
    await_free(run_dir.ranks_lock(host), clock)
    if ended is None:
        return f"its process on {host} had ended, and {host} is well"
    return f"its process {ended} on {host} was still there ({state}) and was killed"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], SystemClock()))
