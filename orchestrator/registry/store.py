"""Folders of entries: written by many processes at once, on file systems such as NFS.

Each job has its own file, which is replaced as a whole. So no lock is needed, no line can be torn,
and a reader sees the old entry or the new one. In the shared folder each user has a folder, which
only that user can write; so nobody can register, change or remove a job of somebody else.
"""

import os
import stat
from collections.abc import Iterator, Mapping
from hashlib import sha256
from pathlib import Path

from msgspec import Struct

from orchestrator.contract.files import env
from orchestrator.contract.files.atomic_write import write_whole
from orchestrator.errors import JobError
from orchestrator.registry.entry import MOST_BYTES, Entry, from_bytes, to_bytes

SUFFIX = ".json"


class Registered(Struct, frozen=True):
    entry: Entry
    path: Path
    """The file of the entry."""
    owner: int
    """User number of the file's owner. Unlike `entry.user`, it cannot be invented."""
    shared: bool
    """It was found in the shared index."""


def state_folder(environ: Mapping[str, str]) -> Path | None:
    """The user's folder of ndctl; None if the environment names no home folder."""
    base = Path(environ.get("XDG_STATE_HOME", ""))
    if not base.is_absolute():  # the XDG specification: a relative path is invalid and ignored
        home = Path(environ.get("HOME", ""))
        if not home.is_absolute():
            return None
        base = home / ".local" / "state"
    return base / "ndctl"


def _own_folder(environ: Mapping[str, str]) -> Path | None:
    folder = state_folder(environ)
    return None if folder is None else folder / "jobs"


def shared_folder(environ: Mapping[str, str]) -> Path | None:
    """The site's index; None if the site has none. Raises JobError for a relative path."""
    named = environ.get(env.INDEX, "")
    if not named:
        return None
    if not Path(named).is_absolute():
        raise JobError(
            f"{env.INDEX} is not an absolute path: {named}",
            fix=f"set {env.INDEX} to a folder that all users and hosts see, or unset it",
        )
    return Path(named)


def register(entry: Entry, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Write the entry to the user's folder and to the shared index.

    Returns a warning for each folder that cannot be written: a job is not refused for that.
    """
    warnings = []
    if (own := _own_folder(environ)) is not None:
        try:
            own.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_whole(_file(own, entry), to_bytes(entry))
        except OSError as exc:
            warnings.append(
                f"the job is not registered: {exc}; `ndctl list` finds it only in its run root"
            )
    try:
        shared = shared_folder(environ)
        if shared is not None:
            _share(shared, entry)
    except JobError as exc:
        warnings.append(f"the job is not in the shared index: {exc}")
    except OSError as exc:
        warnings.append(
            f"the job is not in the shared index: {exc}; if the folder is missing, create it with"
            f" `mkdir -m 1777 FOLDER`, or unset {env.INDEX}"
        )
    return tuple(warnings)


def publish(entry: Entry, environ: Mapping[str, str]) -> None:
    """Write the entry to the shared index, if there is one. Raises OSError and ValueError."""
    try:
        shared = shared_folder(environ)
    except JobError as exc:
        raise ValueError(exc.message) from exc
    if shared is not None:
        _share(shared, entry)


def _share(index: Path, entry: Entry) -> None:
    """Raises OSError. The index itself is not created: a typo must not create folders, and its
    permissions are the site's decision."""
    folder = index / entry.user
    try:
        folder.mkdir()
        folder.chmod(0o755)  # whatever the umask: all users read the index
    except FileExistsError:
        if folder.stat().st_uid != os.geteuid():
            raise PermissionError(f"{folder} belongs to another user") from None
    path = _file(folder, entry)
    write_whole(path, to_bytes(entry))
    path.chmod(0o644)


def _file(folder: Path, entry: Entry) -> Path:
    """The same path on two machines may be two folders, so each machine has its own file."""
    digest = sha256(f"{entry.machine}\0{entry.run_dir}".encode(errors="surrogateescape"))
    return folder / f"{digest.hexdigest()[:32]}{SUFFIX}"


def own_entries(environ: Mapping[str, str]) -> Iterator[Registered]:
    folder = _own_folder(environ)
    if folder is not None:
        yield from _entries(folder, shared=False)


def shared_entries(environ: Mapping[str, str], user: str | None = None) -> Iterator[Registered]:
    """Entries of all users, or of one. Raises JobError if the index cannot be read."""
    index = shared_folder(environ)
    if index is None:
        return
    try:
        with os.scandir(index) as found:
            folders = sorted(one.path for one in found if user in (None, one.name))
    except OSError as exc:
        raise JobError(
            f"the shared index cannot be read: {exc}",
            fix=f"check {env.INDEX}, or unset it to see only your own jobs",
        ) from exc
    for folder in folders:
        yield from _entries(Path(folder), shared=True)


def _entries(folder: Path, *, shared: bool) -> Iterator[Registered]:
    """Every readable entry. Others are skipped: a bad file of one user must not stop the rest."""
    try:
        names = sorted(name for name in os.listdir(folder) if name.endswith(SUFFIX))  # noqa: PTH208
    except OSError:
        return
    for name in names:
        one = _read(folder / name, shared=shared)
        if one is not None:
            yield one


def _read(path: Path, *, shared: bool) -> Registered | None:
    try:
        # Without waiting and without links: the file may be a pipe, or point elsewhere.
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            seen = os.fstat(fd)
            if not stat.S_ISREG(seen.st_mode) or seen.st_size > MOST_BYTES:
                return None
            data = os.read(fd, MOST_BYTES + 1)
        finally:
            os.close(fd)
        return Registered(from_bytes(data), path, seen.st_uid, shared)
    except (OSError, ValueError):
        return None


def forget(run_dir: Path, environ: Mapping[str, str]) -> None:
    """Remove the user's own entries of a run directory. Raises OSError."""
    for one in [*own_entries(environ), *shared_entries(environ)]:
        if one.entry.run_dir == str(run_dir) and one.owner == os.geteuid():
            one.path.unlink(missing_ok=True)
