"""The hosts and ranks of a job with their health: trouble first, healthy hosts folded.

A host with trouble has a line of its own. The others have one too if all fit; else they share lines
by name, else each is one glyph on a map, else they are counted.
"""

from collections import Counter
from collections.abc import Iterator, Sequence

from rich.text import Text

from orchestrator.contract.mesh import AXES, Mesh
from orchestrator.dashboard import format
from orchestrator.dashboard.job_view.health import UNHEALTHY, WORST_FIRST, Health, HostRow
from orchestrator.dashboard.job_view.view import View
from orchestrator.dashboard.screen.rows import Row
from orchestrator.dashboard.theme import DIM, GLYPHS, glyph, title

TITLE = "ranks"
GAP = 3
"""Cells between two columns of hosts, and between two counts."""
MAX_NAME = 28
SHORT = 8
"""Up to so many hosts, each asks for a line of its own."""
MOST_NAMED = 16
"""Lines of hosts by name. More hosts are a map."""
ALL_HOSTS = "*"
"""Key of the line that stands for all hosts. No host has this name."""


def counts_lines(view: View, width: int, *, titled: bool = False) -> list[Text]:
    """`4 on 2 hosts   ✗ 1 dead   ● 3 ok`: counts by health, the worst first, which also explain the
    glyphs. Counts that have no room on the first line are on further ones.

    Args:
        titled: the first line is a title.
    """
    rest = list(_counts(view))
    lines: list[Text] = []
    while rest:
        is_title = titled and not lines
        room = width - (len(TITLE) + 7 if is_title else 2)
        line = rest.pop(0)
        while rest and line.cell_len + GAP + rest[0].cell_len <= room:
            line = Text(" " * GAP).join([line, rest.pop(0)])
        lines.append(title(TITLE, line, width) if is_title else Text("  ").append_text(line))
    return lines


def _counts(view: View) -> Iterator[Text]:
    counts = Counter(health for host in view.hosts for health in host.ranks)
    yield Text(f"{counts.total():,} on {format.count(len(view.hosts), 'host')}", style=DIM)
    for health in WORST_FIRST:
        if counts[health]:
            sign, style = GLYPHS[health]
            yield Text(f"{sign} {counts[health]:,} {format.health_text(health)}", style=style)


def grid(view: View, width: int, height: int) -> list[Row]:
    """At most `height` lines of at most `width` cells."""
    if not view.hosts or height < 1:
        return []
    name = name_width(view.hosts)
    if len(view.hosts) <= height:
        return [host_line(host, view, name, width) for host in view.hosts]
    bad = sorted(hosts_in_trouble(view), key=lambda host: WORST_FIRST.index(host.worst))
    shown = bad[: height - 1] if len(bad) < len(view.hosts) or len(bad) > height else bad
    lines = [host_line(host, view, name, width) for host in shown]
    names = {host.name for host in shown}
    rest = [host for host in view.hosts if host.name not in names]
    return lines + _folded(view.hosts, rest, name, width, height - len(lines))


def lines_needed(view: View, width: int, most: int) -> int:
    """Lines for the trouble, and for the other hosts by name or as a map if `most` lines have room
    for them; else they are counted on one line."""
    if len(view.hosts) <= SHORT:
        return len(view.hosts)
    bad, name = len(hosts_in_trouble(view)), name_width(view.hosts)
    named = -(-(len(view.hosts) - bad) // _per_line(view.hosts, name, width))
    folded = named if named <= MOST_NAMED else -(-len(view.hosts) // _on_map(name, width))
    return bad + (folded if bad + folded <= most else 1)


def hosts_in_trouble(view: View) -> list[HostRow]:
    return [host for host in view.hosts if host.worst in UNHEALTHY]


def name_width(hosts: Sequence[HostRow]) -> int:
    return min(MAX_NAME, max(format.cells(format.one_line(host.name)) for host in hosts))


def host_line(host: HostRow, view: View, name: int, width: int) -> Row:
    """One host on one line, with rank numbers and mesh coordinates if there is room."""
    line = _name(host, name).append("  ")
    number = len(str(view.mesh.world_size - 1))
    if name + 2 + len(host.ranks) * (number + 4) > width:
        return Row(line.append_text(strip(host.ranks, width - line.cell_len)), host.name)
    for place, health in enumerate(host.ranks):
        sign, style = GLYPHS[health]
        line.append(f"{sign} {host.first_rank + place:<{number}}  ", style=style)
    coords = "" if view.is_own else _span(host, view.mesh)
    if line.cell_len + len(coords) + 1 <= width:
        line.append(f" {coords}", style=DIM)
    return Row(line, host.name)


def _name(host: HostRow, width: int) -> Text:
    text = format.clip(format.one_line(host.name), width)
    style = GLYPHS[host.worst][1] if host.worst in UNHEALTHY else ""
    return Text(text + " " * (width - format.cells(text)), style=style)


def _span(host: HostRow, mesh: Mesh) -> str:
    """Mesh coordinates of the ranks of a host: `dp_shard 1, tp 0-7`."""
    first = mesh.coords(host.first_rank)
    last = mesh.coords(host.first_rank + len(host.ranks) - 1)
    degrees = dict(zip(AXES, mesh.degrees, strict=True))
    shown = [
        f"{axis} {first[axis]}"
        if first[axis] == last[axis]
        else f"{axis} {first[axis]}-{last[axis]}"
        for axis in AXES
        if degrees[axis] > 1
    ]
    return ", ".join(shown)


def strip(ranks: Sequence[Health], room: int) -> Text:
    """A glyph for each rank, or a count per health if there is no room."""
    if len(ranks) <= room:
        return Text.assemble(*(glyph(health) for health in ranks))
    counts = Counter(ranks)
    line = Text()
    for health in WORST_FIRST:
        if counts[health]:
            sign, style = GLYPHS[health]
            line.append(f"{sign}{counts[health]} ", style=style)
    return line


def _folded(
    every: Sequence[HostRow], rest: Sequence[HostRow], name: int, width: int, height: int
) -> list[Row]:
    """Many hosts on few lines, the first of which opens the list of all.

    Args:
        every: all hosts, which a map shows, so that a host is found by counting.
        rest: the hosts without a line of their own.
    """
    if not rest or height < 1:
        return []
    named = -(-len(rest) // _per_line(rest, name, width))
    if named <= min(height, MOST_NAMED):
        lines = _columns(rest, name, width)
    elif -(-len(every) // _on_map(name, width)) <= height:
        lines = _map(every, name, width)
    else:
        lines = [_counted(rest, more=len(rest) < len(every))]
    return [Row(lines[0], ALL_HOSTS), *map(Row, lines[1:])]


def _columns(hosts: Sequence[HostRow], name: int, width: int) -> list[Text]:
    """Several hosts on each line, in order, with a glyph for each rank."""
    per_line = _per_line(hosts, name, width)
    size = max(len(host.ranks) for host in hosts)
    return [
        Text(" " * GAP).join(
            _cell(host, name, min(size, width - name - 1)) for host in hosts[at : at + per_line]
        )
        for at in range(0, len(hosts), per_line)
    ]


def _per_line(hosts: Sequence[HostRow], name: int, width: int) -> int:
    cell = name + 1 + max(len(host.ranks) for host in hosts)
    return max(1, (width + GAP) // (cell + GAP))


def _cell(host: HostRow, name: int, size: int) -> Text:
    line = _name(host, name).append(" ").append_text(strip(host.ranks, size))
    line.pad_right(max(0, name + 1 + size - line.cell_len))
    return line


def _on_map(name: int, width: int) -> int:
    """Hosts on one line of the map: a multiple of ten, so that a host is found by counting."""
    room = width - name - 1
    return room - room % 10 if room >= 10 else max(1, room)


def _map(hosts: Sequence[HostRow], name: int, width: int) -> list[Text]:
    """The worst health of each host as one glyph; each line begins with the name of its first."""
    per_line = _on_map(name, width)
    lines = []
    for at in range(0, len(hosts), per_line):
        some = hosts[at : at + per_line]
        first = format.clip(format.one_line(some[0].name), name)
        line = Text(first + " " * (name + 1 - format.cells(first)), style=DIM)
        for health, many in _runs([host.worst for host in some]):
            sign, style = GLYPHS[health]
            line.append(sign * many, style=style)
        lines.append(line)
    return lines


def _runs(values: Sequence[Health]) -> list[tuple[Health, int]]:
    runs: list[tuple[Health, int]] = []
    for value in values:
        if runs and runs[-1][0] == value:
            runs[-1] = (value, runs[-1][1] + 1)
        else:
            runs.append((value, 1))
    return runs


def _counted(hosts: Sequence[HostRow], *, more: bool) -> Text:
    """`… 2,030 more hosts, all ok`. `more`: other hosts have lines of their own."""
    counts = Counter(host.worst for host in hosts)
    if len(counts) == 1:
        what = f"all {_of_hosts(next(iter(counts)))}"
    else:
        what = ", ".join(f"{counts[h]:,} {_of_hosts(h)}" for h in WORST_FIRST if counts[h])
    many = format.count(len(hosts), "more host" if more else "host")
    return Text(f"… {many}, {what}", DIM)


def _of_hosts(worst: Health) -> str:
    """A host whose rank has exited is not dead."""
    return "with exited ranks" if worst == "dead" else format.health_text(worst)
