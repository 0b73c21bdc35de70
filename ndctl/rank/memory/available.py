"""How much memory of this host checkpoints may take."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class _Names(NamedTuple):
    """Files of a control group, and a line of the third one."""

    limit: str
    used: str
    statistics: str
    cached: str


VERSION_2 = _Names("memory.max", "memory.current", "memory.stat", "inactive_file")
VERSION_1 = _Names(
    "memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat", "total_inactive_file"
)
SPARE = 0.1
"""Part of the host's memory that checkpoints leave free: data loaders and page caches need it."""
SHORT = 0.05
"""With less left, they give their memory back. It is half of `SPARE`, because a job that began with
just that may need some more."""


class HostRoom(NamedTuple):
    """Memory that this process can use, in bytes: of the host, or less if its control groups have
    limits."""

    total: int
    free: int
    """What the kernel calls available, and what the limits leave."""

    @property
    def available(self) -> int:
        """What checkpoints may take now."""
        return max(0, self.free - int(SPARE * self.total))

    @property
    def is_short(self) -> bool:
        """Checkpoints should give their memory back, before the kernel kills a process."""
        return self.free < SHORT * self.total


def host_room(root: Path = Path("/")) -> HostRoom:
    """Raises OSError where there is no /proc."""
    total, free = _of_host(root)
    for limit, used in _of_groups(root):
        total, free = min(total, limit), min(free, limit - used)
    return HostRoom(total, max(0, free))


def _of_host(root: Path) -> tuple[int, int]:
    values = {}
    for line in (root / "proc/meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        values[name] = int(rest.split()[0]) << 10
    return values["MemTotal"], values["MemAvailable"]


def _of_groups(root: Path) -> Iterator[tuple[int, int]]:
    """Limit and use of each control group with a limit, in bytes: version 2, or the memory
    controller of version 1. Sources: the kernel's admin-guide/cgroup-v2 and cgroup-v1/memory."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:  # a kernel without control groups
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mount, names = root / "sys/fs/cgroup", VERSION_2
        elif "memory" in controllers.split(","):
            mount, names = root / "sys/fs/cgroup/memory", VERSION_1
        else:
            continue
        group = mount / path.lstrip("/")
        # In a container only the container's own group is mounted, as the topmost one.
        for folder in (group, *group.parents) if group.is_dir() else (mount,):
            if (pair := _pair(folder, names)) is not None:
                yield pair
            if folder == mount:
                break


def _pair(folder: Path, names: _Names) -> tuple[int, int] | None:
    try:
        limit, used, statistics = ((folder / name).read_text().strip() for name in names[:3])
    except OSError:
        return None
    if limit == "max":
        return None
    # The kernel gives these pages of files back first, so they are as good as free.
    cached = next(
        (line for line in statistics.splitlines() if line.startswith(f"{names.cached} ")), ""
    )
    return int(limit), max(0, int(used) - int(cached.split()[1] if cached else 0))
