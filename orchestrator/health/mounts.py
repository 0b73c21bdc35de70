"""Whether file locks hold between hosts, which one host cannot try: how it mounts them."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

NFS_FIX = "mount it with vers=4.1 or newer and without nolock or local_lock"


class Mount(NamedTuple):
    kind: str
    options: frozenset[str]


def read_mounts() -> str:
    """What `doubt` and `mount_of` read, of this process; paths may be any bytes."""
    return Path("/proc/self/mounts").read_text(errors="surrogateescape")


def doubt(mounts: str, place: Path) -> tuple[str, str] | None:
    """Of `read_mounts()`: what is wrong with the locks of the file system that `place` is on,
    and what to do; None where nothing is known against them."""
    found = mount_of(mounts, place)
    if found is None:
        return None
    kind, options = found
    if kind in ("nfs", "nfs4"):
        if options & {"nolock", "local_lock=flock", "local_lock=all"}:
            return "NFS with locks of each host alone", NFS_FIX
        if "vers=3" in options:
            return "NFS 3, which keeps the locks of a host that died until that is back", NFS_FIX
    if kind == "lustre" and "localflock" in options:
        return "Lustre with locks of each host alone", "mount it with -o flock"
    if kind in ("cifs", "smb3"):
        return "SMB, where nobody can read what is locked", "take NFS 4 or a cluster's file system"
    return None


def mount_of(mounts: str, place: Path) -> Mount | None:
    """That `place` is on; of mounts on the same folder the last one counts."""
    over = [
        (len(where.parts), Mount(kind, options))
        for where, kind, options in _read(mounts)
        if place.is_relative_to(where)
    ]
    return max(enumerate(over), key=lambda one: (one[1][0], one[0]))[1][1] if over else None


def _read(mounts: str) -> Iterator[tuple[Path, str, frozenset[str]]]:
    for line in mounts.split("\n")[:-1]:  # other ends of lines may be in names
        _, where, kind, options, *_ = line.split(" ")
        point = Path(re.sub(r"\\(\d{3})", lambda found: chr(int(found[1], 8)), where))
        yield point, kind, frozenset(options.split(","))
