"""Incidents on a job's screen: the newest as one sentence, earlier ones below it."""

from collections.abc import Iterator
from datetime import tzinfo

from rich.text import Text

from orchestrator.contract.mesh import AXES
from orchestrator.dashboard import format
from orchestrator.dashboard.job_view.view import View
from orchestrator.dashboard.screen.rows import Row, Section, plain
from orchestrator.dashboard.status import is_open, lost_work, recovery_text
from orchestrator.dashboard.theme import BOLD, DIM, GLYPHS, title
from orchestrator.diagnosis.cause.verdict import NOBODY
from orchestrator.job.incident import Incident
from orchestrator.job.stage import ENDED

MOST_LINES = 6
"""Of a sentence."""


def incidents(view: View, width: int, zone: tzinfo | None) -> Section:
    blocks = [_incident(view, incident, width, zone) for incident in reversed(view.incidents)]
    if view.verdict:
        blocks.insert(0, _verdict(view.verdict, width))

    def lines(height: int) -> list[Row]:
        info = Text(_info(view), style=DIM)
        return plain([title("incidents", info, width), *_newest(blocks, height - 1, view)])

    max_lines = 1 + sum(map(len, blocks))
    # The sentence about what is wrong now comes before curves; that of the past is less urgent.
    least = 1 + len(blocks[0]) + (len(blocks) > 1) if _is_open(view) else 4
    return Section(min_lines=min(least, max_lines), max_lines=max_lines, priority=2, draw=lines)


def _is_open(view: View) -> bool:
    return view.state == "RECOVERING" and bool(view.verdict or view.incidents)


def sentence(incident: Incident, view: View) -> str:
    """What happened, what ndctl did about it, and how long it took."""
    return f"{format.one_line(incident.cause)}; {_followed(incident, view)}"


def _followed(incident: Incident, view: View) -> str:
    return "; ".join([format.one_line(incident.decided), *_cost(incident, view)])


def _sentence_lines(incident: Incident, view: View, width: int) -> list[str]:
    lines = format.wrapped(sentence(incident, view), width)
    if len(lines) <= MOST_LINES:
        return lines
    # The cause of a hang is long. Cut it, and not what ndctl did and how long it took.
    followed = _cut_lines(_followed(incident, view), width, MOST_LINES - 1)
    cause = _cut_lines(format.one_line(incident.cause), width, MOST_LINES - len(followed))
    return [*cause, *followed]


def _cut_lines(text: str, width: int, most: int) -> list[str]:
    return format.wrapped(text, width, max_lines=most, placeholder=" …")


def who_text(incident: Incident) -> str:
    return "no culprit" if incident.culprit == NOBODY else format.one_line(str(incident.culprit))


def _cost(incident: Incident, view: View) -> Iterator[str]:
    found = format.detection_delay(incident.detected_after_s)
    if is_open(incident, view.state) and view.state not in ENDED:
        yield f"{found}, recovering for {format.duration(view.now - incident.at)}"
    else:
        yield recovery_text(incident, view.state)
    if incident.lost_steps:
        yield str(lost_work(incident))


def _info(view: View) -> str:
    known = str(len(view.incidents)) if view.incidents else "none"
    settled = not view.incidents or view.incidents[-1].resumed_after_s is not None
    if view.state == "RECOVERING" and settled:
        stage = "stopping all ranks after" if view.verdict else "collecting evidence of"
        return f"{stage} a new one{f', {known} before' if view.incidents else ''}"
    return known


def _verdict(text: str, width: int) -> list[Text]:
    sign, style = GLYPHS["dead"]
    lines = _cut_lines(text, max(10, width - 4), MOST_LINES)
    heads = [Text(f"  {sign} ", style), *[Text("    ")] * len(lines)]
    return [Text.assemble(head, line) for head, line in zip(heads, lines, strict=False)]


def _newest(blocks: list[list[Text]], height: int, view: View) -> list[Text]:
    """Whole incidents, newest first, and a line that counts the incidents left out."""
    if sum(map(len, blocks)) <= height:
        return [line for block in blocks for line in block]
    lines: list[Text] = []
    for index, block in enumerate(blocks):
        left = len(blocks) - index
        if height - len(lines) < len(block) + (left > 1):
            short = _cut(block, height - len(lines) - (left > 1)) if index == 0 else []
            older = left - 1 if short else left
            note = [Text(f"  … {older:,} earlier: {view.commands.of('describe')}", style=DIM)]
            return [*lines, *short, *(note if older else [])][:height]
        lines += block
    return lines


def _cut(block: list[Text], height: int) -> list[Text]:
    """The first lines of an incident; the last one shows that there is more."""
    shown = block[: max(0, height)]
    if not shown:
        return []
    last = shown[-1].copy()
    last.append(" …", style=DIM)
    return [*shown[:-1], last]


def _incident(view: View, incident: Incident, width: int, zone: tzinfo | None) -> list[Text]:
    recovered = not is_open(incident, view.state)
    sign, style = GLYPHS["done" if recovered else "dead"]
    head = Text.assemble(
        (f"  {sign} ", style),
        f"{format.short_date_time(incident.at, zone)} ",
        (incident.kind, BOLD if recovered else style),
        (" drill" if incident.drill else "", DIM),
    )
    who, place = who_text(incident), _place(view, incident)
    heads = [head]
    if head.cell_len + 2 + format.cells(who) <= width:
        head.append(f"  {who}")
    else:
        heads.append(Text(f"    {who}"))
    if heads[-1].cell_len + len(place) <= width:
        heads[-1].append(place, style=DIM)
    lines = _sentence_lines(incident, view, max(10, width - 4))
    return [*heads, *(Text(f"    {line}") for line in lines)]


def _place(view: View, incident: Incident) -> str:
    """Mesh coordinates of the culprit."""
    rank = incident.culprit.rank
    # A rank of an earlier, larger plan has no place in the present mesh.
    if rank is None or view.is_own or rank >= view.mesh.world_size:
        return ""
    degrees = dict(zip(AXES, view.mesh.degrees, strict=True))
    coords = format.coordinates(view.mesh.coords(rank), degrees)
    return f" ({coords})" if coords else ""
