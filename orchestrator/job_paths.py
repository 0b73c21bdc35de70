"""Finds jobs by name. It imports almost nothing, because every command starts here."""

import errno
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from orchestrator.contract.codec import nearest
from orchestrator.contract.files import env
from orchestrator.contract.files.run_dir import DEFAULT_RUN_ROOT, RunDir
from orchestrator.errors import JobError
from orchestrator.posix.denied import denied, owner_of

MOST_NAMES = 20
"""Names of existing jobs in an error."""
MOST_NAME = 255
"""Bytes of a file name on Linux's file systems; the system refuses to look for a longer one."""


def run_root_of(option: str | None, environ: Mapping[str, str], spec_root: str = "") -> Path:
    """`--run-root`, else NDCTL_RUN_ROOT, else the spec's, else the user's, else the default."""
    if given := option or environ.get(env.RUN_ROOT) or spec_root:
        return Path(given)
    return Path(user_run_root(environ) or DEFAULT_RUN_ROOT)


def user_run_root(environ: Mapping[str, str]) -> str | None:
    """From the user's settings. Raises SpecError if they have a mistake."""
    if not env.has_user_config(environ):
        return None
    from orchestrator.specs import user_config

    return user_config.user_run_root(environ)


def user_price(environ: Mapping[str, str]) -> float | None:
    """Price of a GPU for an hour, as `user_run_root`."""
    if not env.has_user_config(environ):
        return None
    from orchestrator.specs import user_config

    return user_config.user_price(environ)


def find_job(run_root: Path, name: str) -> RunDir:
    """Raises JobError with the existing names if there is no such job."""
    run_dir = RunDir((run_root / name).absolute())
    if not has_run(run_root, name):
        names = [job.path.name for job in jobs(run_root)]
        near = nearest(name, names)
        raise JobError(
            f"no job {name!r} in {run_root.absolute()}; existing jobs: {some_of(names)}",
            fix=f"did you mean {near}?"
            if near
            else "`ndctl list` shows the jobs of all folders that you used, --run-root FOLDER those"
            " of another; a job of sbatch appears once it has started",
        )
    return run_dir


def some_of(names: Iterable[str]) -> str:
    """Names in an error; of many, the first in alphabetical order."""
    ordered = sorted(set(names))
    more = len(ordered) - MOST_NAMES
    listed = ", ".join(ordered[:MOST_NAMES]) or "none"
    return listed if more <= 0 else f"{listed} and {more:,} more"


def is_pattern(name: str) -> bool:
    """Whether `name` is a pattern. Job names cannot have these characters."""
    return any(char in name for char in "*?[")


def has_run(run_root: Path, name: str) -> bool:
    """Raises JobError if the run directory belongs to another user."""
    if len(name.encode(errors="surrogatepass")) > MOST_NAME:
        return False
    path = run_root / name
    try:
        journal = path / "journal.jsonl"
        if not journal.exists():
            return False
        if os.access(journal, os.R_OK, effective_ids=True):
            return True
        raise PermissionError
    except PermissionError as exc:
        if not os.access(run_root, os.X_OK, effective_ids=True):
            raise denied(PermissionError(errno.EACCES, "", path.absolute())) from exc
        raise JobError(
            f"{path.absolute()} cannot be read: it is the run directory of {owner_of(path)}",
            # Not `chmod -R`: who reads the secret can end the job.
            fix="its owner can give the group access: "
            f"`find {path.absolute()} ! -name token -exec chmod g+rX {{}} +`",
        ) from exc


def jobs(run_root: Path) -> list[RunDir]:
    """All jobs in the run root, sorted by name."""
    return [RunDir(path.parent.absolute()) for path in sorted(run_root.glob("*/journal.jsonl"))]


def folders(run_root: Path) -> list[Path]:
    """What may be a run directory, sorted by name. None is looked into, because the storage of one
    may hang."""
    try:
        with os.scandir(run_root) as found:
            names = sorted(one.name for one in found if not one.is_file(follow_symlinks=False))
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return []
    return [run_root.absolute() / name for name in names]
