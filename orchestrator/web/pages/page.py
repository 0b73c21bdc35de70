"""A page as blocks of rows, so that a browser which has one state needs only the rows that changed.

Each row is one element with the attribute `data-key`, and each block one element with `data-block`.
All text goes through `element`, which escapes it.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

from msgspec import Struct

from orchestrator.contract.visible import visible
from orchestrator.plan.page.markup import Markup, element

Rows = Mapping[str, Markup]
"""Key -> element, in the order in which they are shown."""
Layout = Callable[[Mapping[str, Rows]], Markup]


class Page(Struct, frozen=True, kw_only=True):
    title: str
    blocks: Mapping[str, Rows]
    layout: Layout
    """From the blocks to the content of `<main>`."""
    at: float | None = None
    """Unix time of what it shows, if that is not the time of the look."""
    status: int = 200
    charts: bytes = b""
    """JSON for charts; empty: the page has none."""


def row(tag: str, key: str, *children: Any, **attributes: object) -> Markup:
    return element(tag, *children, data_key=key, **attributes)


def block(tag: str, name: str, rows: Rows, **attributes: object) -> Markup:
    return element(tag, rows.values(), id=name, data_block=name, **attributes)


def section(title: str, *content: Markup, **attributes: object) -> Markup:
    """A part of a page with a headline. The style sheet hides it while its blocks are empty."""
    return element("section", element("h2", title), content, **attributes)


def whole(page: Page) -> bytes:
    """The message for a browser whose state is not known: every row."""
    blocks = {name: _all_of(rows) for name, rows in page.blocks.items()}
    return _message(page.title, blocks, page.charts)


def change(old: Page, new: Page) -> bytes:
    """The message for a browser that has `old`; empty if nothing changed."""
    blocks = {}
    for name, rows in new.blocks.items():
        before = old.blocks.get(name)
        changed = _all_of(rows) if before is None else _changes(before, rows)
        if changed:
            blocks[name] = changed
    charts = new.charts if new.charts != old.charts else b""
    if not blocks and not charts and new.title == old.title:
        return b""
    return _message(new.title, blocks, charts)


def _all_of(rows: Rows) -> dict[str, Any]:
    return {"order": list(rows), "set": dict(rows)}


def _changes(before: Rows, rows: Rows) -> dict[str, Any]:
    changed: dict[str, Any] = {}
    if news := {key: said for key, said in rows.items() if before.get(key) != said}:
        changed["set"] = news
    if list(before) != list(rows):
        changed["order"] = list(rows)
    return changed


def _message(title: str, blocks: Mapping[str, Any], charts: bytes) -> bytes:
    # A message of server-sent events ends at a line break; JSON writes those in texts as \n.
    text = json.dumps({"title": visible(title), "blocks": blocks}, separators=(",", ":"))
    return text.encode() if not charts else b'%s,"charts":%s}' % (text[:-1].encode(), charts)
