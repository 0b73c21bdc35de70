"""The grid of hosts and ranks with their health. If not all fit, unhealthy hosts come first."""

from collections import Counter
from collections.abc import Sequence

from rich.text import Text

from orchestrator.contract.mesh import AXES, Mesh
from orchestrator.dashboard import format
from orchestrator.dashboard.theme import DIM, GLYPHS, glyph
from orchestrator.dashboard.view import UNHEALTHY, WORST_FIRST, Health, HostRow, View

GAP = 3
"""Cells between two columns of hosts."""
MAX_NAME = 28


def grid_info(view: View) -> Text:
    """`4 on 2 hosts   ✗ 1 dead   ● 3 ok`: counts by health, which also explain the glyphs.

    The worst health comes first, because the end of the line is cut off on a narrow screen.
    """
    counts = Counter(health for host in view.hosts for health in host.ranks)
    hosts = format.count(len(view.hosts), "host")
    info = Text.assemble((f"{counts.total():,} on {hosts}", DIM))
    for health in WORST_FIRST:
        if counts[health]:
            sign, style = GLYPHS[health]
            text = format.health_text(health)
            info.append(f"   {sign} {counts[health]:,} {text}", style=style)
    return info


def grid_lines(view: View, width: int, height: int) -> list[Text]:
    """At most `height` lines of at most `width` cells."""
    if not view.hosts or height < 1:
        return []
    name = min(MAX_NAME, max(len(host.name) for host in view.hosts))
    if len(view.hosts) <= height:
        return [_host_line(host, view, name, width) for host in view.hosts]
    return _columns(view.hosts, name, width, height)


def lines_needed(view: View, width: int) -> int:
    """Lines for the whole grid: one per host up to eight hosts, else several hosts per line."""
    if len(view.hosts) <= 8:
        return len(view.hosts)
    name = min(MAX_NAME, max(len(host.name) for host in view.hosts))
    return -(-len(view.hosts) // _per_line(view.hosts, name, width))


def _host_line(host: HostRow, view: View, name: int, width: int) -> Text:
    """One host on one line, with rank numbers and mesh coordinates if there is room."""
    line = _name(host, name).append("  ")
    number = len(str(view.mesh.world_size - 1))
    if name + 2 + len(host.ranks) * (number + 4) > width:
        return line.append_text(strip(host.ranks, width - line.cell_len))
    for place, health in enumerate(host.ranks):
        sign, style = GLYPHS[health]
        line.append(f"{sign} {host.first_rank + place:<{number}}  ", style=style)
    coords = "" if view.is_own else _span(host, view.mesh)
    if line.cell_len + len(coords) + 1 <= width:
        line.append(f" {coords}", style=DIM)
    return line


def _name(host: HostRow, width: int) -> Text:
    text = host.name if len(host.name) <= width else f"{host.name[: width - 1]}…"
    style = GLYPHS[host.worst][1] if host.worst in UNHEALTHY else ""
    return Text(text.ljust(width), style=style)


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


def _columns(hosts: Sequence[HostRow], name: int, width: int, height: int) -> list[Text]:
    """Several hosts on each line, in order; if not all fit, unhealthy hosts come first."""
    per_line = _per_line(hosts, name, width)
    if len(hosts) <= per_line * height:
        shown, hidden = list(hosts), []
    else:
        ranked = sorted(hosts, key=lambda host: WORST_FIRST.index(host.worst))
        room = per_line * (height - 1)
        shown, hidden = ranked[:room], ranked[room:]
    size = max((len(host.ranks) for host in shown), default=0)
    lines = [
        Text(" " * GAP).join(
            _cell(host, name, min(size, width - name - 1)) for host in shown[at : at + per_line]
        )
        for at in range(0, len(shown), per_line)
    ]
    return [*lines, _rest(hidden)] if hidden else lines


def _per_line(hosts: Sequence[HostRow], name: int, width: int) -> int:
    cell = name + 1 + max(len(host.ranks) for host in hosts)
    return max(1, (width + GAP) // (cell + GAP))


def _cell(host: HostRow, name: int, size: int) -> Text:
    line = _name(host, name).append(" ").append_text(strip(host.ranks, size))
    line.pad_right(max(0, name + 1 + size - line.cell_len))
    return line


def _rest(hidden: Sequence[HostRow]) -> Text:
    """`… 2,030 more hosts, all ok`."""
    counts = Counter(host.worst for host in hidden)
    if len(counts) == 1:
        what = f"all {format.health_text(next(iter(counts)))}"
    else:
        what = ", ".join(f"{counts[h]:,} {format.health_text(h)}" for h in WORST_FIRST if counts[h])
    return Text(f"… {len(hidden):,} more {'host' if len(hidden) == 1 else 'hosts'}, {what}", DIM)
