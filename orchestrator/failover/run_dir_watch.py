"""Checks whether the run directory was moved or removed while the leader runs.

`ndctl cancel` cannot find a leader whose directory is gone, and submitting the job again would run
it twice. A directory that cannot be read is not gone: a failing file server (EIO, ESTALE, a
timeout) may recover.
"""

from pathlib import Path

from msgspec import Struct

from orchestrator.contract.files.run_dir import RunDir
from orchestrator.contract.times import date_time
from orchestrator.seams import Clock

SURE_S = 2.0
"""The directory must be missing for so long. A single check may see a stale name cache of NFS."""


class RunDirGone(Exception):
    """The run directory was moved, removed or replaced by another one."""


class Loss(Struct, frozen=True):
    what: str
    at: float
    """When it was first seen, on the monotonic clock, ..."""
    now: float
    """... and as Unix time."""


class RunDirWatch:
    def __init__(self, run_dir: RunDir, clock: Clock) -> None:
        """Create it when the leader has just opened its journal there."""
        self.run_dir, self.clock = run_dir, clock
        self.journal = _identity(run_dir.journal)
        self.lost: Loss | None = None

    def look(self) -> None:
        """Raises RunDirGone if the directory is certainly gone, OSError if that cannot be told."""
        what = self._what_is_lost()
        # If an earlier check found a loss, it saw a stale name cache.
        if what is None:
            self.lost = None
            return
        now = self.clock.monotonic()
        if self.lost is None:
            self.lost = Loss(what, now, self.clock.now())
        elif now - self.lost.at >= SURE_S:
            raise RunDirGone(self._words(self.lost))

    def _what_is_lost(self) -> str | None:
        journal = _identity(self.run_dir.journal)
        if journal is None:
            return f"{self.run_dir.journal} is gone"
        # The directory was moved, and another job has got its name since.
        if journal != self.journal:
            return f"{self.run_dir.journal} is another file than this job's"
        # Without the fence the ranks stop too, because they count the run directory as lost.
        if _identity(self.run_dir.fence) is None:
            return f"{self.run_dir.fence} is gone"
        return None

    def _words(self, lost: Loss) -> str:
        since, path = date_time(lost.now), self.run_dir.path
        return (
            f"the run directory was moved or removed while the job ran: {lost.what} since {since};"
            f" the ranks were stopped. If it was moved, move away what is at {path} now, because"
            " agents may have written there since; then move it back and go on with"
            " `ndctl submit SPEC --resume`; else submit the job again"
        )


def _identity(path: Path) -> tuple[int, int] | None:
    """Device and inode; None if the file does not exist."""
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_dev, found.st_ino
