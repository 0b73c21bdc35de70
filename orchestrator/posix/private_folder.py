"""A folder of one process that no other user can enter, create in advance, or write to.

An agent keeps the socket for its ranks there. The folder has a random name and mode 0700. Its owner
holds a lock (flock) on the folder while it lives. If the lock is free, the folder was left by a
killed process, and the next process of the same user removes it. The lock also keeps
systemd-tmpfiles from deleting the folder after ten days.
"""

import contextlib
import errno
import fcntl
import os
import pwd
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

PREFIX = "ndctl-agent-"
NAME = re.compile(re.escape(PREFIX) + r"[a-z0-9_]{8}")
"""Names that mkdtemp gives. A folder with any other name must not be removed."""
SOCKET = "ranks.sock"
LOCK = "lock"
"""The file that is locked in place of the folder on NFS."""
PATH_BYTES = 107
"""Longest path of a Unix socket, without the terminating zero byte."""
NAME_BYTES = len(f"/{PREFIX}12345678/{SOCKET}")
TRIES = 20
LOGIN_FOLDERS = Path("/run/user")
LINGER = Path("/var/lib/systemd/linger")


class NoPrivateFolder(OSError):
    """Every possible place lets other users replace the folder, or cannot be written."""


@contextlib.contextmanager
def private_folder(environ: Mapping[str, str]) -> Iterator[Path]:
    """The folder, which is removed at the end. Raises NoPrivateFolder."""
    base = base_for(environ)
    try:
        remove_abandoned(base)
        folder, fd = _make(base)
    except OSError as exc:  # a full disk, or a file system without locks
        raise NoPrivateFolder(f"{base}: {exc}") from exc
    try:
        yield folder
    finally:
        _remove(folder, fd)


def base_for(environ: Mapping[str, str], linger: Path = LINGER) -> Path:
    """Where the folder is created. Raises NoPrivateFolder with the problem of each place."""
    refused = []
    for place in _places(environ, linger):
        why = _unsafe(place)
        if why is None and len(os.fsencode(place)) + NAME_BYTES > PATH_BYTES:
            why = f"a socket there has a path longer than {PATH_BYTES} bytes"
        if why is None:
            return place
        refused.append(f"{place}: {why}")
    raise NoPrivateFolder("; ".join(refused))


def _places(environ: Mapping[str, str], linger: Path) -> list[Path]:
    """Candidates, best first."""
    runtime = environ.get("XDG_RUNTIME_DIR", "")
    mine = [Path(runtime)] if _is_mine(runtime) and _outlives_login(Path(runtime), linger) else []
    return [*mine, Path(tempfile.gettempdir())]


def _is_mine(runtime: str) -> bool:
    """Whether this is a folder as XDG requires: absolute, ours, mode 0700, and no link."""
    if not Path(runtime).is_absolute():
        return False
    try:
        found = os.lstat(runtime)
    except OSError:
        return False
    private = stat.S_ISDIR(found.st_mode) and stat.S_IMODE(found.st_mode) == 0o700
    return private and found.st_uid == os.geteuid()


def _outlives_login(runtime: Path, linger: Path) -> bool:
    """Whether the folder stays after the user logs out.

    logind removes /run/user/UID at the end of the user's last session, but a job that was submitted
    in that session continues. logind keeps the folder of users with lingering enabled.
    """
    if not runtime.is_relative_to(LOGIN_FOLDERS):
        return True
    try:
        return (linger / pwd.getpwuid(os.geteuid()).pw_name).exists()
    except KeyError:  # a user without a name, as in containers, where there is no logind either
        return False


def _unsafe(place: Path) -> str | None:
    """Why other users could replace what we create there; None if they cannot."""
    try:
        mode = place.stat().st_mode
    except OSError as exc:
        return exc.strerror
    if not stat.S_ISDIR(mode):
        return "is not a folder"
    if mode & (stat.S_IWGRP | stat.S_IWOTH) and not mode & stat.S_ISVTX:
        return "other users may rename files in it (no sticky bit)"
    if not os.access(place, os.W_OK | os.X_OK):
        return "is not writable"
    return None


def _make(base: Path) -> tuple[Path, int]:
    why = "other processes removed it"
    for _ in range(TRIES):
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))  # mode 0700, and new
        try:
            # Until this lock is taken, another agent of this user may remove the folder.
            if (fd := _locked(folder)) is not None:
                return folder, fd
        except OSError as exc:
            why = exc.strerror or str(exc)
        shutil.rmtree(folder, ignore_errors=True)
    raise NoPrivateFolder(
        f"a new folder could not be locked ({why});"
        " set TMPDIR, and XDG_RUNTIME_DIR if it is set, to local folders"
    )


def remove_abandoned(base: Path) -> None:
    """Remove folders of this user whose processes are gone."""
    for folder in base.iterdir():
        if NAME.fullmatch(folder.name) is None:
            continue
        # Folders of other users cannot be opened, and links are not followed.
        with contextlib.suppress(OSError):
            if (fd := _locked(folder)) is None:
                continue
            if _keeps_out(folder):
                _remove(folder, fd)
            else:
                os.close(fd)


def _remove(folder: Path, fd: int) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    os.close(fd)  # not earlier: who makes a folder and has not locked it yet must not lose it
    with contextlib.suppress(OSError):
        folder.rmdir()  # on NFS a removed file stays until it is closed


def _keeps_out(folder: Path) -> bool:
    """Whether locks work here at all. On a file system where they do not, every folder looks
    abandoned, and removing it would cut an agent off from its ranks."""
    try:
        fd = _locked(folder)
    except OSError:
        return False
    if fd is not None:
        os.close(fd)
    return fd is None


def _locked(folder: Path) -> int | None:
    """A descriptor that holds the lock of `folder`. None if another user owns the folder, or if
    another process holds the lock or has removed the folder."""
    if folder.lstat().st_uid != os.geteuid():
        return None
    try:
        return _lock(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as exc:
        if exc.errno != errno.EBADF:
            raise
        # NFS locks only what is open for writing, and a folder cannot be.
        return _lock(folder / LOCK, os.O_RDWR | os.O_CREAT)


def _lock(path: Path, flags: int) -> int | None:
    fd = os.open(path, flags | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(path.lstat(), os.fstat(fd)):
            return fd
    except BlockingIOError:
        pass
    except OSError:
        os.close(fd)
        raise
    os.close(fd)
    return None
