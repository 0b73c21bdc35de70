"""A copy of ndctl's code in the run directory: a job that is queued again runs what was submitted.

Of the user's working directory nothing is copied: the copy comes first on the path of all that the
job runs, and a `torch.py` among a user's files would be imported instead of torch. Of ndctl's own
packages only what an installation of it has: an `.env`, a key or a core file that lies in a
checkout stays there.
"""

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from orchestrator.errors import Refused
from orchestrator.seams import Clock

PACKAGES = ("orchestrator", "trainer")
HOME = Path(__file__).resolve().parents[4]
"""Of the packages that this process runs itself."""
KINDS = frozenset({".py", ".yaml", ".toml"})
"""Of files in an installation (`package-data` in pyproject.toml)."""
MOST_FILES = 5_000
MOST_BYTES = 64 << 20
MOST_S = 30.0
"""For the walk: a file system that takes longer would take minutes for the copy."""
NAMED = 5
"""Files left out that are named one by one."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """What a snapshot takes of ndctl's packages, as paths below `home`."""

    home: Path
    files: tuple[Path, ...]
    left_out: tuple[Path, ...]

    def words(self) -> str:
        """What stays out of the snapshot, in words; empty where nothing does."""
        if not self.left_out:
            return ""
        named = ", ".join(str(path) for path in self.left_out[:NAMED])
        more = len(self.left_out) - NAMED
        return f"{named} and {more} more" if more > 0 else named


def choose(clock: Clock, home: Path = HOME) -> Chosen:
    """Walk the packages and write nothing. Raises Refused where they are no code, by their size."""
    began = clock.monotonic()
    files: list[Path] = []
    left_out: list[Path] = []
    size = 0
    for path in _walk(home):
        wanted = path.suffix in KINDS and not path.name.startswith(".") and path.is_file()
        (files if wanted else left_out).append(path.relative_to(home))
        size += path.stat().st_size if wanted else 0
        seconds = clock.monotonic() - began
        if len(files) + len(left_out) > MOST_FILES or size > MOST_BYTES or seconds > MOST_S:
            raise _too_large(home, len(files) + len(left_out), size, seconds)
    return Chosen(home, tuple(sorted(files)), tuple(sorted(left_out)))


def _walk(home: Path) -> Iterator[Path]:
    for package in PACKAGES:
        for folder, folders, names in os.walk(home / package):
            folders[:] = [one for one in folders if one != "__pycache__"]
            yield from (Path(folder) / name for name in names)


def _too_large(home: Path, files: int, size: int, seconds: float) -> Refused:
    return Refused(
        f"cluster.slurm.snapshot: {home} has {files:,} files and {size / 2**20:,.0f} MiB of code or"
        f" more (looked at for {seconds:.0f} s); a snapshot takes at most {MOST_FILES:,} files,"
        f" {MOST_BYTES >> 20} MiB and {MOST_S:.0f} s",
        fix="remove what is no code of ndctl from it, or set cluster.slurm.snapshot to false;"
        " nothing was written or queued",
    )


def take(chosen: Chosen, target: Path) -> None:
    """Put the files under `target`, in the place of what is there; whole, or not at all."""
    fresh = target.with_name(f"{target.name}.part")
    shutil.rmtree(fresh, ignore_errors=True)  # of a submission that was killed
    for path in chosen.files:
        (fresh / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(chosen.home / path, fresh / path)
    shutil.rmtree(target, ignore_errors=True)
    fresh.rename(target)
