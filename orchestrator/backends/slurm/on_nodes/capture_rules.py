"""Which files of the user's folder are not copied: what its ignore file names, and what is no code.

`.ndctlignore` in the folder, if there is one; else every `.gitignore` that git would read, also in
folders above up to the top of the checkout. Both have git's syntax.
"""

import os
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Self

from msgspec import Struct

from orchestrator.backends.slurm.on_nodes.ignore_patterns import Pattern, ignored, parse

OWN, OF_GIT = ".ndctlignore", ".gitignore"
TOOLS = frozenset(
    (
        *(".git", ".hg", ".svn", "__pycache__", "node_modules", ".tox", ".nox"),
        *(".mypy_cache", ".ruff_cache", ".pytest_cache", ".hypothesis", ".ipynb_checkpoints"),
        *(".ssh", ".aws", ".azure", ".kube", ".docker", ".gnupg", ".config", ".cache", ".local"),
    )
)
"""Names of folders of tools, and of folders in a home directory that hold keys."""
ENVIRONMENT = ("pyvenv.cfg", "conda-meta")
"""A folder with one of these is a Python environment."""
JOURNAL = "journal.jsonl"
"""A folder with this file is the run directory of a job."""
SECRETS = (
    *(".env", ".env.*", ".envrc", ".netrc", ".git-credentials", ".pypirc", ".npmrc", ".pgpass"),
    *("id_rsa*", "id_dsa*", "id_ecdsa*", "id_ed25519*", "kubeconfig"),
    *("*.pem", "*.key", "*.p12", "*.pfx", "*.jks", "*.kdbx"),
)
CHECKPOINTS = ("*.pt", "*.pth", "*.ckpt", "*.safetensors", "*.distcp", "*.gguf", "*model*.bin")
WASTE = ("*.pyc", "core", "core.[0-9]*", ".DS_Store")
NO_CODE = (*SECRETS, *CHECKPOINTS, *WASTE)


def is_never_copied(path: Path, *, is_folder: bool) -> bool:
    name = path.name.lower()
    if name in TOOLS:  # `.git` is a file in a worktree
        return True
    if not is_folder:
        return any(fnmatchcase(name, pattern) for pattern in NO_CODE)
    return any((path / one).exists() for one in (*ENVIRONMENT, JOURNAL))


class Rules(Struct, frozen=True):
    """Ignore files that count in one folder, the outermost first."""

    files: tuple[tuple[str, tuple[Pattern, ...]], ...] = ()
    """Folder of the file, and its patterns."""
    is_own: bool = False
    """They are from `.ndctlignore`, so that no other file is read."""

    @classmethod
    def of(cls, folder: Path) -> Self:
        """The rules that count in `folder` itself. Raises OSError."""
        if (folder / OWN).is_file():
            return cls(((str(folder), _read(folder / OWN)),), is_own=True)
        rules = cls()
        for one in (*reversed(_above(folder)), folder):
            rules = rules.inside(str(one))
        return rules

    def inside(self, folder: str) -> Self:
        """The same, with the file of a folder below. Raises OSError."""
        path = Path(folder, OF_GIT)
        if self.is_own or not path.is_file():
            return self
        return type(self)((*self.files, (folder, _read(path))))

    def ignore(self, path: str, *, is_folder: bool) -> bool:
        # As for git, the innermost file that says anything decides.
        for folder, patterns in reversed(self.files):
            said = ignored(patterns, os.path.relpath(path, folder), is_folder=is_folder)
            if said is not None:
                return said
        return False


def _above(folder: Path) -> Sequence[Path]:
    """Folders above it in its git checkout, the nearest first; none if it is in no checkout."""
    if (folder / ".git").exists():
        return ()
    for count, one in enumerate(folder.parents, 1):
        if (one / ".git").exists():
            return folder.parents[:count]
    return ()


def _read(path: Path) -> tuple[Pattern, ...]:
    return parse(path.read_text(errors="surrogateescape").split("\n"))
