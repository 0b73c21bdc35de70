"""Builds HTML and SVG in which every text is escaped.

`element` is the only way to markup. Names of jobs, hosts and switches come from users and clusters,
so none may become markup.
"""

from collections.abc import Iterable, Sequence
from html import escape

from orchestrator.contract.visible import visible

VOID = ("meta", "link", "input", "rect", "polygon", "line", "circle", "polyline")
"""Elements without content."""


class Markup(str):
    """HTML or SVG as `element` returns it."""

    __slots__ = ()


def element(tag: str, *children: str | Iterable[Markup], **attributes: object) -> Markup:
    """`<tag ...>children</tag>`. A child that is no `Markup` is text and is escaped.

    In the names of attributes `class_` stands for `class`, and `_` for `-`. An attribute that is
    None is left out.
    """
    said = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{escaped(value)}"'
        for name, value in attributes.items()
        if value is not None
    )
    if tag in VOID and not children:
        return Markup(f"<{tag}{said}/>")
    return Markup(f"<{tag}{said}>{''.join(map(_content, children))}</{tag}>")


def escaped(said: object) -> str:
    """Text for a page. Control and bidirectional characters are written out."""
    return escape(visible(str(said)), quote=True)


def _content(child: str | Iterable[Markup]) -> str:
    if isinstance(child, Markup):
        return child
    return escaped(child) if isinstance(child, str) else "".join(child)


def grid_table(head: Sequence[str], body: Iterable[Sequence[str]], left: int = 1) -> Markup:
    """A table that scrolls sideways on a narrow screen; the first `left` columns are text."""
    heads = [element("th", said, scope="col", class_=_side(n, left)) for n, said in enumerate(head)]
    lines = [
        element("tr", [element("td", said, class_=_side(n, left)) for n, said in enumerate(row)])
        for row in body
    ]
    table = element("table", element("thead", element("tr", heads)), element("tbody", lines))
    return element("div", table, class_="scroll")


def _side(column: int, left: int) -> str | None:
    return None if column < left else "number"
