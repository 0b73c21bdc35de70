"""What the control group of this agent, and so of its ranks, says of memory.

The kernel's log says the same, but in a container, or below Slurm, few may read it; these counters
anybody may. Both versions: https://docs.kernel.org/admin-guide/cgroup-v2.html (memory.events) and
cgroup-v1/memory.html (memory.oom_control, since Linux 4.13).
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator
from pathlib import Path

Count = Callable[[], int | None]
"""Processes of the group that the kernel ended for want of memory, since the group was made."""

LOOK_S = 10.0
"""Between two looks."""
MOST_CHANGES = 64


class Kills:
    """When there were how many of them, as far as that was looked at: one of days ago explains
    nothing of now."""

    def __init__(self, count: Count, now: float) -> None:
        self.count = count
        self.looked = now
        self.changes = [(now, count())]

    def look(self, now: float) -> None:
        """As often as one likes."""
        if now - self.looked >= LOOK_S:
            self._look(now)

    def after(self, then: float, now: float) -> tuple[str, ...]:
        """A line as the kernel's, of what has happened since."""
        self._look(now)
        place = bisect_right(self.changes, then, key=lambda change: change[0])
        return told(self.changes[max(0, place - 1)][1], self.changes[-1][1])

    def _look(self, now: float) -> None:
        self.looked, many = now, self.count()
        if many != self.changes[-1][1]:
            self.changes = [*self.changes, (now, many)][-MOST_CHANGES:]


def oom_kills(root: Path = Path("/")) -> int | None:
    """None where nothing can be read."""
    for file in _counters(root):
        try:
            words = dict(line.split(None, 1) for line in file.read_text().splitlines())
        except (OSError, ValueError):
            continue
        if words.get("oom_kill", "").isdigit():
            return int(words["oom_kill"])
    return None


def told(before: int | None, now: int | None) -> tuple[str, ...]:
    """A line as the kernel's, of what has happened in between."""
    if before is None or now is None or now <= before:
        return ()
    many = "1 process" if now - before == 1 else f"{now - before} processes"
    return (f"memory cgroup: oom_kill {before} -> {now}: the kernel ended {many} of this group",)


def _counters(root: Path) -> Iterator[Path]:
    """The files that may have it, of version 2 first."""
    groups = dict(_groups(root))
    for kind, controllers, mount, top in _mounts(root):
        is_v1 = kind == "cgroup" and "memory" in controllers
        if kind != "cgroup2" and not is_v1:
            continue
        group = groups.get("memory" if is_v1 else "")
        if group is not None:
            # What is mounted in a container may be its own group alone, under the host's name.
            inside = group.removeprefix(top) if top != "/" else group
            folder = root / mount.lstrip("/") / inside.lstrip("/")
            yield folder / ("memory.oom_control" if is_v1 else "memory.events")


def _groups(root: Path) -> Iterator[tuple[str, str]]:
    """Controller, or nothing for version 2, and the group of this process."""
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, group = line.split(":", 2)
        for one in controllers.split(","):
            yield one, group


def _mounts(root: Path) -> Iterator[tuple[str, list[str], str, str]]:
    """Kind, options, where it is, and which group is at its top; version 2 first."""
    found = []
    for line in _lines(root / "proc/self/mountinfo"):
        fields, _, rest = line.partition(" - ")
        kind, _, options = rest.split(" ", 2)
        _, _, _, top, mount, *_ = fields.split(" ")
        if kind in ("cgroup", "cgroup2"):
            found.append((kind, options.split(","), mount, top))
    yield from sorted(found, key=lambda one: one[0] != "cgroup2")


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(errors="surrogateescape").split("\n")[:-1]  # of any bytes
    except OSError:
        return []
