"""HTML for notebooks. All text in it comes from specs, hosts and logs, so all text is escaped."""

import html
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from orchestrator.contract.visible import visible
from orchestrator.dashboard import format

if TYPE_CHECKING:
    from ndctl.client.values import Status

Row = tuple[str, str]
"""A label and a text."""


def escape(text: str) -> str:
    return html.escape(visible(text))


def table(title: str, rows: Iterable[Row]) -> str:
    cells = "".join(
        f'<tr><th style="text-align:left">{escape(label)}</th>'
        f'<td style="text-align:left;white-space:pre-wrap">{escape(text)}</td></tr>'
        for label, text in rows
    )
    return f"<table><caption>{escape(title)}</caption>{cells}</table>"


def preformatted(text: str) -> str:
    return f"<pre>{escape(text)}</pre>"


def status_rows(status: "Status") -> Iterator[Row]:
    yield "reason", status.reason
    if status.fix:
        yield "fix", status.fix
    if status.as_of is not None:
        yield "as of", format.date_time(status.as_of, None)
    yield "since", format.date_time(status.since, None)
    if status.scheduler:
        yield "scheduler", status.scheduler
    yield from (("excluded", f"{host} {why}") for host, why in status.excluded.items())
    yield "progress", _progress(status)
    yield "where", f"{status.world_size:,} ranks on {', '.join(status.hosts)}; {status.backend}"
    yield "restarts", f"attempt {status.attempt}, {format.count(status.restarts, 'restart')}"
    if status.checkpoint is not None and status.checkpoint.path is not None:
        yield "checkpoint", status.checkpoint.path
    yield from (("straggler", f"rank {one.rank} on {one.host}") for one in status.stragglers)
    for one in status.incidents[-1:]:
        yield (
            "last incident",
            f"{format.date_time(one.at, None)} {one.kind}: {one.cause}; {one.action}",
        )
    yield "run dir", status.run_dir


def _progress(status: "Status") -> str:
    words = [f"step {format.steps(status.step, status.steps)}"]
    if status.loss is not None:
        words.append(f"loss {format.loss(status.loss)}")
    if status.tokens_per_second is not None:
        words.append(format.rate(status.tokens_per_second))
    if status.eta_s is not None:
        words.append(f"about {format.duration(status.eta_s)} left")
    return ", ".join(words)
