"""The cgroup's counters of OOM kills and CPU throttling. The agent and its ranks share a cgroup.

The kernel's log has OOM kills too, but users often cannot read it in a container or under Slurm.
Every user can read these counters. Sources: https://docs.kernel.org/admin-guide/cgroup-v2.html
(memory.events, cpu.stat), cgroup-v1/memory.html (memory.oom_control, since Linux 4.13) and
https://docs.kernel.org/scheduler/sched-bwc.html (cpu.stat).
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator
from pathlib import Path

from msgspec import Struct

Count = Callable[[], int | None]
"""How often something happened since the group was created; None if that is unknown."""


class Counter(Struct, frozen=True):
    controller: str
    of_v2: str
    """The file with the counter."""
    of_v1: str


MEMORY = Counter("memory", "memory.events", "memory.oom_control")
PROCESSORS = Counter("cpu", "cpu.stat", "cpu.stat")
MOST_GROUPS = 16
"""Most nested groups that are read."""
LOOK_S = 10.0
"""Least time between two readings of a counter."""
MOST_CHANGES = 64


class Counted:
    """The history of a counter, so that events of days ago do not explain a failure of now."""

    def __init__(self, count: Count, now: float) -> None:
        self.count = count
        self.looked = now
        self.changes = [(now, count())]

    def look(self, now: float) -> None:
        """Read the counter if the last reading is old enough. Call it as often as you like."""
        if now - self.looked >= LOOK_S:
            self._look(now)

    def between(self, then: float, now: float) -> tuple[int | None, int | None]:
        """The counter's value at `then` and its value now."""
        self._look(now)
        place = bisect_right(self.changes, then, key=lambda change: change[0])
        # The first reading also stands for the time before it, which is unknown.
        return self.changes[max(0, place - 1)][1], self.changes[-1][1]

    def grew(self, then: float, now: float) -> bool:
        before, since = self.between(then, now)
        return before is not None and since is not None and since > before

    def _look(self, now: float) -> None:
        self.looked, value = now, self.count()
        if value != self.changes[-1][1]:
            self.changes = [*self.changes, (now, value)][-MOST_CHANGES:]


def oom_kills(root: Path = Path("/")) -> int | None:
    """None where nothing can be read."""
    counts = (_count(folder / name, "oom_kill") for folder, name in _counters(root, MEMORY))
    return next((count for count in counts if count is not None), None)


def throttlings(root: Path = Path("/")) -> int | None:
    """Number of periods in which the group or one of its parents had used up its CPU quota; None
    if no counter is readable."""
    for folder, name in _counters(root, PROCESSORS):
        within = [folder, *folder.parents][:MOST_GROUPS]
        counts = [_count(one / name, "nr_throttled") for one in within]
        if known := [count for count in counts if count is not None]:
            return sum(known)
    return None


def _count(file: Path, word: str) -> int | None:
    try:
        words = dict(line.split(None, 1) for line in file.read_text().splitlines())
    except (OSError, ValueError):
        return None
    return int(words[word]) if words.get(word, "").isdigit() else None


def told(before: int | None, now: int | None) -> tuple[str, ...]:
    """A line like one of the kernel's log, if the count of OOM kills has grown."""
    if before is None or now is None or now <= before:
        return ()
    killed = "1 process" if now - before == 1 else f"{now - before} processes"
    return (f"memory cgroup: oom_kill {before} -> {now}: the kernel killed {killed} of this group",)


def _counters(root: Path, wanted: Counter) -> Iterator[tuple[Path, str]]:
    """Folders of this process's group, each with the counter's file name; version 2 first."""
    groups = dict(_groups(root))
    for kind, controllers, mount, top in _mounts(root):
        is_v1 = kind == "cgroup" and wanted.controller in controllers
        if kind != "cgroup2" and not is_v1:
            continue
        group = groups.get(wanted.controller if is_v1 else "")
        if group is not None:
            # In a container only the container's own group may be mounted, while /proc/self/cgroup
            # names the group from the host's root.
            inside = group.removeprefix(top) if top != "/" else group
            folder = root / mount.lstrip("/") / inside.lstrip("/")
            yield folder, wanted.of_v1 if is_v1 else wanted.of_v2


def _groups(root: Path) -> Iterator[tuple[str, str]]:
    """Each controller (an empty name for version 2) and its group of this process."""
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, group = line.split(":", 2)
        for one in controllers.split(","):
            yield one, group


def _mounts(root: Path) -> Iterator[tuple[str, list[str], str, str]]:
    """Kind, options, mount point and topmost group of each cgroup mount; version 2 first."""
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
