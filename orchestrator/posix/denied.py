"""Errors for files that cannot be read, such as those in another user's run directory."""

import contextlib
import os
import pwd
from pathlib import Path

from ndctl.rank.regular_file import NotRegular
from orchestrator.errors import JobError


def denied(exc: PermissionError) -> JobError:
    """An error that names the file, and the folder or file that is not accessible with its
    owner."""
    path = Path(str(exc.filename))
    closed, owner = _closed(path)
    where = "" if closed == path else f": you have no access to {closed}"
    whose = f", which belongs to {owner}" if owner else ""
    return JobError(
        f"permission denied: {path}{where}{whose}",
        fix="use a run root of your own (--run-root, NDCTL_RUN_ROOT), or ask the owner to give a"
        " group of yours access to the run directory (cluster.slurm.group and mode)",
    )


def not_a_file(exc: NotRegular) -> JobError:
    """The error for a FIFO, a folder or a device in place of a file of a run directory."""
    path = Path(str(exc.filename))
    owner = ""
    with contextlib.suppress(OSError):
        owner = f" of {user_of(path.lstat())}"
    return JobError(
        f"{path}{owner} cannot be read: {exc.strerror}",
        fix="remove it, or use another run root (--run-root, NDCTL_RUN_ROOT)",
    )


def _closed(path: Path) -> tuple[Path, str]:
    """The innermost visible part of the path, which denies access, and its owner; the owner is
    empty if nothing is visible."""
    for seen in (path, *path.parents):
        with contextlib.suppress(OSError):
            seen.stat()
            return seen, owner_of(seen)
    return path, ""


def owner_of(path: Path) -> str:
    """The owner of a file, or of what a link leads to."""
    return user_of(path.stat())


def user_of(found: os.stat_result) -> str:
    """The owner's name, or number if this machine does not know the name."""
    try:
        return f"user {pwd.getpwuid(found.st_uid).pw_name}"
    except KeyError:
        return f"user {found.st_uid}"
