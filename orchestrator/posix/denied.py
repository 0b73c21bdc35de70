"""What a person is told whom the kernel kept from a file, as from another user's run directory."""

import contextlib
from pathlib import Path

from orchestrator.errors import JobError


def denied(exc: PermissionError) -> JobError:
    """Names the file, and the owner of the folder or file that is closed."""
    path = Path(str(exc.filename))
    closed, owner = _closed(path)
    where = "" if closed == path else f": {closed} is closed to you"
    whose = f", and belongs to {owner}" if owner else ""
    return JobError(
        f"you may not use {path}{where}{whose}",
        fix="name a run root of your own (--run-root, NDCTL_RUN_ROOT), or have the owner open the"
        " run directory to a group that you are in (cluster.slurm.group and mode)",
    )


def _closed(path: Path) -> tuple[Path, str]:
    """What can still be seen of the path from above, and whose it is; empty where nothing can."""
    for seen in (path, *path.parents):
        with contextlib.suppress(OSError):
            seen.stat()
            return seen, owner_of(seen)
    return path, ""


def owner_of(path: Path) -> str:
    """By name, as far as this machine knows one."""
    try:
        return f"user {path.owner()}"
    except KeyError:
        return f"user {path.stat().st_uid}"
