"""All hosts of a job, one host with its ranks, and one rank."""

from collections.abc import Iterator

from rich.text import Text

from orchestrator.contract.mesh import AXES
from orchestrator.dashboard import format
from orchestrator.dashboard.follow.newest_lines import NewestLines
from orchestrator.dashboard.interactive.content import JobContent
from orchestrator.dashboard.interactive.page import Page
from orchestrator.dashboard.interactive.places import RANK
from orchestrator.dashboard.interactive.text_page import tail
from orchestrator.dashboard.job_view.health import WORST_FIRST, Health, HostRow
from orchestrator.dashboard.job_view.view import View
from orchestrator.dashboard.screen.grid import counts_lines, host_line, name_width
from orchestrator.dashboard.screen.incidents import sentence, who_text
from orchestrator.dashboard.screen.rows import Frame, Row, framed, plain
from orchestrator.dashboard.theme import BOLD, DIM, GLYPHS, title
from orchestrator.job.hosts.straggler_replacement import why_slow


def hosts_page(page: Page, content: JobContent) -> Frame:
    view = content.view
    found = [host for host in view.hosts if page.matches(f"{host.name} {_words(host)}")]
    ordered = sorted(found, key=lambda host: WORST_FIRST.index(host.worst))
    filtered = f"   /{format.one_line(page.place.needle)}" if page.place.needle else ""
    words = f"{format.count(len(found), 'host')}{filtered}"
    head = [page.job_head(view, words), *counts_lines(view, page.width)]
    if not found:
        return page.of_rows([*head, Text(), Text(" no host has that text")], [], [])
    name = name_width(view.hosts)
    lines = [host_line(host, view, name, page.width - 2) for host in ordered]
    rows = [Row(Text(" ").append_text(row.text), row.opens) for row in lines]
    return page.of_rows(head, rows, [])


def _words(host: HostRow) -> str:
    return " ".join(format.health_text(health) for health in set(host.ranks))


def host_page(page: Page, content: JobContent) -> Frame:
    view = content.view
    host = next((one for one in view.hosts if one.name == page.place.host), None)
    if host is None:
        gone = page.job_head(view, f"{format.one_line(page.place.host)} has no ranks now")
        return page.of_rows([gone], [], list(_incidents(page, view, page.place.host)))
    head = [page.job_head(view, format.one_line(host.name)), *_agent(content, host.name)]
    rows = [
        Row(_with_why(_rank_line(view, rank, health), view, rank), f"{RANK}{rank}")
        for rank, health in enumerate(host.ranks, host.first_rank)
    ]
    return page.of_rows(head, rows, list(_incidents(page, view, host.name)))


def _agent(content: JobContent, host: str) -> Iterator[Text]:
    run = content.snapshot.seen.run
    known = run.hosts.by_name.get(host)
    if known is None:
        yield Text(" its agent has not registered", style=DIM)
        return
    alive = "" if known.alive else ", lost"
    leads = ", leader" if run.scheduler.leader == host else ""
    yield Text(f" agent pid {known.pid} at {known.address}{alive}{leads}", style=DIM)


def _rank_line(view: View, rank: int, health: Health) -> Text:
    sign, style = GLYPHS[health]
    number = len(str(view.mesh.world_size - 1))
    line = Text.assemble("  ", (f"{sign} rank {rank:<{number}}", style))
    line.append(f"  {format.health_text(health):<14}", style=style)
    line.append(_coordinates(view, rank), style=DIM)
    return line


def _with_why(line: Text, view: View, rank: int) -> Text:
    slow = next((found for found in view.stragglers if found.rank == rank), None)
    return line if slow is None else line.append(f"  {format.one_line(why_slow(slow))}")


def _coordinates(view: View, rank: int) -> str:
    if view.is_own or rank >= view.mesh.world_size:
        return ""
    degrees = dict(zip(AXES, view.mesh.degrees, strict=True))
    return format.coordinates(view.mesh.coords(rank), degrees)


def _incidents(page: Page, view: View, host: str, rank: int | None = None) -> Iterator[Text]:
    """Of a host or a rank, the newest first."""
    found = [
        one
        for one in view.incidents
        if one.culprit.host == host and (rank is None or one.culprit.rank in (None, rank))
    ]
    what = f"rank {rank}" if rank is not None else format.one_line(host)
    info = Text(str(len(found)) if found else "none", style=DIM)
    yield title(f"incidents of {what}", info, page.width)
    for one in reversed(found):
        at = format.short_date_time(one.at, page.zone)
        yield from page.wrapped(f"{at} {one.kind}, {who_text(one)}", BOLD)
        yield from page.wrapped(sentence(one, view))


def rank_page(page: Page, content: JobContent, logs: NewestLines) -> Frame:
    view, rank = content.view, page.place.rank
    assert rank is not None
    host = next((one for one in view.hosts if one.name == page.place.host), None)
    place = None if host is None else rank - host.first_rank
    head = [page.job_head(view, f"rank {rank} on {format.one_line(page.place.host)}")]
    if host is not None and place is not None and 0 <= place < len(host.ranks):
        head.append(_rank_line(view, rank, host.ranks[place]))
    slow = [found for found in view.stragglers if found.rank == rank]
    for found in slow:
        over = f"over {format.count(found.steps, 'step')} of {format.duration(found.step_s)} each"
        since = f"since {format.date_time(found.at, page.zone)}"
        head += page.wrapped(f"{format.one_line(why_slow(found))}; measured {over}, {since}")
    head += list(_incidents(page, view, page.place.host, rank))[: page.room // 2]
    head.append(title("its last lines", Text("l: all of them", style=DIM), page.width))
    lines = tail(logs.lines, page.width - 2, max(0, page.height - 1 - len(head)))
    if not lines:
        lines = [Text(" no log here yet", style=DIM)]
    rows = [*head, *lines]
    rows += [Text()] * (page.height - 1 - len(rows))
    return framed(plain([*rows[: page.height - 1], page.footer]), page.width, page.height)
