"""What the control group of this agent, and so of its ranks, says of memory and processors.

The kernel's log says the same, but in a container, or below Slurm, few may read it; these counters
anybody may. Both versions: https://docs.kernel.org/admin-guide/cgroup-v2.html (memory.events,
cpu.stat), cgroup-v1/memory.html (memory.oom_control, since Linux 4.13) and
https://docs.kernel.org/scheduler/sched-bwc.html (cpu.stat).
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

Count = Callable[[], int | None]
"""How often something happened to the group since it was made; None where that is not known."""


@dataclass(frozen=True, slots=True)
class Counter:
    controller: str
    of_v2: str
    """The file that has it."""
    of_v1: str


MEMORY = Counter("memory", "memory.events", "memory.oom_control")
PROCESSORS = Counter("cpu", "cpu.stat", "cpu.stat")
MOST_GROUPS = 16
"""In which a group can be, one in another."""
LOOK_S = 10.0
"""Between two looks."""
MOST_CHANGES = 64


class Counted:
    """When something had happened how often, as far as that was looked at: what was days ago
    explains nothing of now."""

    def __init__(self, count: Count, now: float) -> None:
        self.count = count
        self.looked = now
        self.changes = [(now, count())]

    def look(self, now: float) -> None:
        """As often as one likes."""
        if now - self.looked >= LOOK_S:
            self._look(now)

    def between(self, then: float, now: float) -> tuple[int | None, int | None]:
        """How often until then, and until now."""
        self._look(now)
        place = bisect_right(self.changes, then, key=lambda change: change[0])
        return self.changes[max(0, place - 1)][1], self.changes[-1][1]

    def grew(self, then: float, now: float) -> bool:
        before, since = self.between(then, now)
        return before is not None and since is not None and since > before

    def _look(self, now: float) -> None:
        self.looked, many = now, self.count()
        if many != self.changes[-1][1]:
            self.changes = [*self.changes, (now, many)][-MOST_CHANGES:]


class Kills(Counted):
    """Of processes, which the kernel ended for want of memory."""

    def after(self, then: float, now: float) -> tuple[str, ...]:
        """A line as the kernel's, of what has happened since."""
        return told(*self.between(then, now))


def oom_kills(root: Path = Path("/")) -> int | None:
    """None where nothing can be read."""
    counts = (_count(folder / name, "oom_kill") for folder, name in _counters(root, MEMORY))
    return next((count for count in counts if count is not None), None)


def throttlings(root: Path = Path("/")) -> int | None:
    """In how many periods the group, or one that it is in, had used up its share of the
    processors; None where nothing can be read."""
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
    """A line as the kernel's, of what has happened in between."""
    if before is None or now is None or now <= before:
        return ()
    many = "1 process" if now - before == 1 else f"{now - before} processes"
    return (f"memory cgroup: oom_kill {before} -> {now}: the kernel ended {many} of this group",)


def _counters(root: Path, wanted: Counter) -> Iterator[tuple[Path, str]]:
    """The folder of the group and the file that may have it, of version 2 first."""
    groups = dict(_groups(root))
    for kind, controllers, mount, top in _mounts(root):
        is_v1 = kind == "cgroup" and wanted.controller in controllers
        if kind != "cgroup2" and not is_v1:
            continue
        group = groups.get(wanted.controller if is_v1 else "")
        if group is not None:
            # What is mounted in a container may be its own group alone, under the host's name.
            inside = group.removeprefix(top) if top != "/" else group
            folder = root / mount.lstrip("/") / inside.lstrip("/")
            yield folder, wanted.of_v1 if is_v1 else wanted.of_v2


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
