"""A copy of ndctl's code in the run directory, so that a requeued job runs the submitted version.

Nothing is copied from the user's working directory, because the copy is first on the import path
and a `torch.py` of the user would replace torch. Only files that an installation of ndctl has are
copied, so that an `.env`, a key or a core file in a checkout is not.
"""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

from orchestrator.errors import Refused
from orchestrator.run_module import PACKAGES
from orchestrator.seams import Clock

HOME = Path(__file__).resolve().parents[4]
"""Parent folder of the packages of this process."""
KINDS = frozenset({".py", ".typed", ".yaml", ".toml", ".js", ".css", ".txt"})
"""Suffixes of files in an installation (`package-data` in pyproject.toml)."""
MOST_FILES = 5_000
MOST_BYTES = 64 << 20
MOST_S = 30.0
"""Maximum seconds to list the files. If it takes longer, the copy would take minutes."""
NAMED = 5
"""Maximum number of excluded files that are named."""


class Chosen(Struct, frozen=True):
    """Files of a snapshot, as paths below `home`."""

    home: Path
    files: tuple[Path, ...]
    left_out: tuple[Path, ...]

    def words(self) -> str:
        """The excluded files as text; empty: none."""
        if not self.left_out:
            return ""
        named = ", ".join(str(path) for path in self.left_out[:NAMED])
        more = len(self.left_out) - NAMED
        return f"{named} and {more} more" if more > 0 else named


def choose(clock: Clock, home: Path = HOME) -> Chosen:
    """List the files of the packages. Raises Refused if they are too many or too large."""
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
        f"cluster.slurm.snapshot: {home} has at least {files:,} files and {size / 2**20:,.0f} MiB"
        f" of code (listed for {seconds:.0f} s); the limits are {MOST_FILES:,} files,"
        f" {MOST_BYTES >> 20} MiB and {MOST_S:.0f} s",
        fix="remove files that do not belong to ndctl, or set cluster.slurm.snapshot to false;"
        " nothing was written or queued",
    )


def take(chosen: Chosen, target: Path) -> None:
    """Copy the files to `target` atomically, and replace an existing copy."""
    fresh = target.with_name(f"{target.name}.part")
    shutil.rmtree(fresh, ignore_errors=True)  # left by a submission that was killed
    for path in chosen.files:
        (fresh / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(chosen.home / path, fresh / path)
    shutil.rmtree(target, ignore_errors=True)
    fresh.rename(target)
