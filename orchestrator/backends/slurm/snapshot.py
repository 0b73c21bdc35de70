"""A copy of the code in the run directory: a job that is queued again runs what was submitted."""

import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from orchestrator.errors import BackendError
from orchestrator.seams import Shell

LIMIT_BYTES = 200 * 1024 * 1024
JUNK = frozenset(
    {".git", ".hg", ".venv", "venv", "node_modules", "__pycache__", ".mypy_cache", ".pytest_cache"}
    | {".ruff_cache", ".tox", "wandb", "ndctl-runs"}
)
"""Folders that are no code, where no git says what is."""
GIT_S = 60.0
PACKAGES = ("orchestrator", "trainer")


def take(tree: Path, target: Path, shell: Shell) -> None:
    """Copy the code of `tree`, and ndctl's own where that lies elsewhere.

    Raises BackendError when it is too large to be code.
    """
    shutil.rmtree(target, ignore_errors=True)
    _copy(tree, _files_of(tree, target, shell), target)
    home = Path(__file__).resolve().parents[3]
    for package in PACKAGES:
        if not (target / package).is_dir():
            found = _walked(home / package, target)
            _copy(home, [Path(package) / path for path in found], target)


def _files_of(tree: Path, target: Path, shell: Shell) -> list[Path]:
    """Relative: what git tracks or would offer to track; without git, all but obvious junk."""
    listed = shell(
        ["git", "-C", str(tree), "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        timeout=GIT_S,
    )
    if listed.code != 0:
        return list(_walked(tree, target))
    names = [Path(name) for name in listed.out.split("\0") if name]
    return [name for name in names if (tree / name).is_file()]


def _walked(tree: Path, target: Path) -> Iterator[Path]:
    runs = target.parent.resolve()  # a run directory is no code
    for folder, inner, names in os.walk(tree.resolve()):
        here = Path(folder)
        inner[:] = [one for one in inner if one not in JUNK and here / one != runs]
        yield from ((here / name).relative_to(tree.resolve()) for name in sorted(names))


def _copy(tree: Path, names: Sequence[Path], target: Path) -> None:
    total = sum((tree / name).stat().st_size for name in names if (tree / name).exists())
    if total > LIMIT_BYTES:
        largest = max(names, key=lambda name: (tree / name).stat().st_size)
        raise BackendError(
            f"the working tree {tree} has {total / 2**20:,.0f} MiB, a snapshot may have"
            f" {LIMIT_BYTES / 2**20:,.0f}; the largest file is {largest}",
            fix="list what is no code in .gitignore, or set cluster.slurm.snapshot to false",
        )
    for name in names:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(tree / name, target / name)
