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

from orchestrator.backends.host_processes import clear_host
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
        sys.stdout.write(clear_host(RunDir(args.run_dir), args.host, clock) + "\n")
    except (BackendError, OSError) as exc:
        sys.stderr.write(f"failed to clear {args.host}: {exc}\n")
        return exit_codes.FAILED
    return exit_codes.OK


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], SystemClock()))
