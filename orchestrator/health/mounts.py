"""Whether file locks work between hosts, judged by the mount options. One host cannot test it."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

NFS_FIX = "mount it with vers=4.1 or newer and without nolock or local_lock"


class Mount(NamedTuple):
    kind: str
    options: frozenset[str]


def read_mounts() -> str:
    """The mounts of this process, for `doubt` and `mount_of`. Paths may be any bytes."""
    return Path("/proc/self/mounts").read_text(errors="surrogateescape")


def doubt(mounts: str, place: Path) -> tuple[str, str] | None:
    """The problem with file locks on the file system of `place`, and its fix; None if no problem is
    known. `mounts`: the result of `read_mounts`."""
    found = mount_of(mounts, place)
    if found is None:
        return None
    kind, options = found
    if kind in ("nfs", "nfs4"):
        if options & {"nolock", "local_lock=flock", "local_lock=all"}:
            return "NFS with locks that are local to each host", NFS_FIX
        if "vers=3" in options:
            return "NFS 3, which keeps the locks of a dead host until it reboots", NFS_FIX
    if kind == "lustre" and "localflock" in options:
        return "Lustre with locks that are local to each host", "mount it with -o flock"
    if kind in ("cifs", "smb3"):
        return "SMB, where locked files cannot be read", "use NFS 4 or a cluster file system"
    return None


def mount_of(mounts: str, place: Path) -> Mount | None:
    """The mount of `place`. The last of several mounts on one folder counts."""
    over = [
        (len(where.parts), Mount(kind, options))
        for where, kind, options in _read(mounts)
        if place.is_relative_to(where)
    ]
    return max(enumerate(over), key=lambda one: (one[1][0], one[0]))[1][1] if over else None


def _read(mounts: str) -> Iterator[tuple[Path, str, frozenset[str]]]:
    for line in mounts.split("\n")[
        :-1
    ]:  # splitlines would also split at line ends that are part of names
        _, where, kind, options, *_ = line.split(" ")
        point = Path(re.sub(r"\\(\d{3})", lambda found: chr(int(found[1], 8)), where))
        yield point, kind, frozenset(options.split(","))
