"""A submission that its scheduler refuses leaves the run directory as it found it.

What a submission writes has to be there before the scheduler has the job, which may start at once.
So it is taken back where the scheduler says no. Where it does not answer nothing is taken back: it
may have the job.
"""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from orchestrator.contract.files.atomic_write import write_whole
from orchestrator.contract.files.run_dir import RunDir
from orchestrator.journal.journal import Journal, Place
from orchestrator.seams import Clock


@dataclass(frozen=True, slots=True, kw_only=True)
class Before:
    """A run directory as it was before a submission wrote into it."""

    run_dir: RunDir
    names: frozenset[Path] | None
    """What was in it and in its folder of Slurm's; None: it was not there."""
    replaced: Mapping[Path, bytes]
    """Small files that a submission writes again."""
    archived: Path | None
    """Where `--new` has put the run of the same name."""


def look(run_dir: RunDir, archived: Path | None) -> Before:
    """Raises OSError."""
    if not run_dir.path.exists():
        return Before(run_dir=run_dir, names=None, replaced={}, archived=archived)
    again = (run_dir.launch, run_dir.submitted)
    return Before(
        run_dir=run_dir,
        names=frozenset(_names(run_dir)),
        replaced={path: path.read_bytes() for path in again if path.exists()},
        archived=archived,
    )


def restore(before: Before, end: Place, clock: Clock) -> None:
    """Take back all that came since; `end`: the journal's, as it was. Raises OSError, JobError."""
    run_dir = before.run_dir
    if before.names is None:
        shutil.rmtree(run_dir.path)
        if before.archived is not None:
            before.archived.rename(run_dir.path)
        return
    if run_dir.journal in before.names:
        with Journal(run_dir.journal, clock) as journal:
            journal.cut_back(end)
    for path in set(_names(run_dir)) - before.names:
        if run_dir.slurm not in before.names and path.parent == run_dir.slurm:
            continue  # goes with its folder
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    for path, data in before.replaced.items():
        write_whole(path, data)


def _names(run_dir: RunDir) -> list[Path]:
    inside = run_dir.slurm.iterdir() if run_dir.slurm.is_dir() else ()
    return [*run_dir.path.iterdir(), *inside]
