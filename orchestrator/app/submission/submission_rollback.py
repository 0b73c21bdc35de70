"""Restore the run directory if the scheduler refuses a submission.

A submission writes its files before the scheduler gets the job, because the job may start
immediately. If the scheduler refuses the job, the files are removed. If the scheduler does not
answer, they stay, because it may have the job.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct

from ndctl.rank.regular_file import read_regular
from orchestrator.contract.files.atomic_write import write_whole
from orchestrator.contract.files.run_dir import RunDir
from orchestrator.journal.journal import Journal, Place
from orchestrator.seams import Clock


class Before(Struct, frozen=True, kw_only=True):
    """A run directory as it was before a submission wrote into it."""

    run_dir: RunDir
    names: frozenset[Path] | None
    """Paths in it and in its Slurm folder; None: it did not exist."""
    replaced: Mapping[Path, bytes]
    """Content of files that a submission overwrites."""
    archived: Path | None
    """Where `--new` moved the old run."""


def look(run_dir: RunDir, archived: Path | None) -> Before:
    """Raises OSError."""
    if not run_dir.path.exists():
        return Before(run_dir=run_dir, names=None, replaced={}, archived=archived)
    again = (run_dir.launch, run_dir.submitted)
    return Before(
        run_dir=run_dir,
        names=frozenset(_names(run_dir)),
        replaced={path: read_regular(path) for path in again if path.exists()},
        archived=archived,
    )


def restore(before: Before, end: Place, clock: Clock) -> None:
    """Undo all changes. `end`: end of the journal before them. Raises OSError, JobError."""
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
            continue  # removed with its folder
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    for path, data in before.replaced.items():
        write_whole(path, data)


def _names(run_dir: RunDir) -> list[Path]:
    inside = run_dir.slurm.iterdir() if run_dir.slurm.is_dir() else ()
    return [*run_dir.path.iterdir(), *inside]
