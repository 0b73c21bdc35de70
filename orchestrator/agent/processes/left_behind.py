"""Processes that ranks leave behind when they end: data servers, loggers, savers.

The next attempt needs their ports, GPUs and files, so none of them may outlive its attempt. A
process of the ranks has at least one of three marks, as long as it does not remove all of them: the
lock, which a fork keeps open; the session of torchrun, which lasts until it starts its own; the
variables of a rank, which a program passes on to those that it starts.
"""

import logging
import os
from contextlib import suppress
from functools import partial
from pathlib import Path

from msgspec import Struct

from orchestrator.agent.evidence.rank_evidence import has_open
from orchestrator.contract.files import env
from orchestrator.contract.files.run_dir import RunDir
from orchestrator.posix.run_with_timeout import within

log = logging.getLogger(__name__)

SCAN_S = 10.0
"""Limit to look for processes. Reading the environment of one that hangs in the kernel may hang."""
MOST_NAMED = 8
SLURM_JOB = "SLURM_JOB_ID"


class Marks(Struct, frozen=True, kw_only=True):
    """What shows that a process was started by the ranks of this host."""

    lock: str
    """Path of the file that the processes of the ranks share."""
    session: int | None
    """Of torchrun; None: it was not started."""
    variables: tuple[bytes, ...]
    """All of them are in the environment, the last one with any value."""

    def has_process(self, pid: int, session: int, *, held: bool) -> bool:
        # A rank that waits in the kernel has this session. Reading its environment could wait too.
        if session == self.session or self._are_in(Path(f"/proc/{pid}/environ").read_bytes()):
            return True
        return held and has_open(pid, self.lock)

    def _are_in(self, environ: bytes) -> bool:
        *exact, name = self.variables
        known = environ.split(b"\0")
        return all(one in known for one in exact) and any(one.startswith(name) for one in known)


def marks_of(
    run_dir: RunDir, host: str, torchrun: int | None = None, slurm_job: str | None = None
) -> Marks:
    """
    Args:
        torchrun: its process id; None: it was not started.
        slurm_job: the Slurm job of the agent.
    """
    values = {env.RUN_DIR: str(run_dir.path), env.HOST: host}
    # A rank may submit another job (`sbatch eval.sh`), which gets its variables too and may run on
    # this host.
    if slurm_job is not None:
        values[SLURM_JOB] = slurm_job
    values[env.TORCHRUN_PID] = ""
    return Marks(
        lock=str(run_dir.ranks_lock(host).resolve()),
        session=torchrun,
        variables=tuple(os.fsencode(f"{name}={value}") for name, value in values.items()),
    )


async def find_left(marks: Marks, *, held: bool) -> dict[int, str]:
    """Process id -> name, of each process with a mark that this user may end.

    Args:
        held: look for processes that have the lock, too, which takes longest.
    """
    try:
        return await within(SCAN_S, partial(_find, marks, held=held))
    except TimeoutError:
        log.warning("reading /proc timed out after %.0f s: ranks may have left processes", SCAN_S)
        return {}


def _find(marks: Marks, *, held: bool) -> dict[int, str]:
    found = dict[int, str]()
    for process in Path("/proc").glob("[0-9]*"):
        pid = int(process.name)
        with suppress(OSError):  # it has just ended, or belongs to another user
            # The name is in parentheses, and may have parentheses and spaces itself.
            name, _, rest = (process / "stat").read_text().rpartition(")")
            state, _, _, session = rest.split()[:4]
            os.kill(pid, 0)
            # The agent opens the lock to test it, and must not end itself.
            own = pid == os.getpid() or state in "ZX"
            if not own and marks.has_process(pid, int(session), held=held):
                found[pid] = name.partition("(")[2]
    return found


def named(left: dict[int, str]) -> str:
    words = [f"{pid} ({name})" for pid, name in sorted(left.items())]
    more = len(words) - MOST_NAMED
    return ", ".join(words[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
