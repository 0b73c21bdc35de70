"""The HTML document around the content of a page."""

from orchestrator.plan.page.markup import Markup, element
from orchestrator.web.pages.page import Page

VIEWPORT = "width=device-width, initial-scale=1"
SCRIPTS = ("uplot.js", "page.js")
STYLES = ("uplot.css", "page.css")


def document(page: Page, version: str, at: str, live: str | None) -> bytes:
    """
    Args:
        version: of the static files, so that a browser takes the new ones after an upgrade.
        at: of which time the page is, as text.
        live: path of the page's events; None: the page does not change.
    """
    html = element(
        "html",
        element("head", _head(page, version)),
        element("body", _header(at), page.layout(page.blocks), data_live=live),
        lang="en",
    )
    # A name of a file may have bytes that are no text; `visible` has written them out.
    return f"<!doctype html>{html}".encode()


def _head(page: Page, version: str) -> list[Markup]:
    return [
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content=VIEWPORT),
        element("meta", name="color-scheme", content="light dark"),
        element("title", page.title),
        element("link", rel="icon", href="data:,"),
        *(element("link", rel="stylesheet", href=f"/static/{one}?v={version}") for one in STYLES),
        *(element("script", src=f"/static/{one}?v={version}", defer="defer") for one in SCRIPTS),
    ]


def _header(at: str) -> Markup:
    return element(
        "header",
        element("a", "ndctl", href="/", class_="brand"),
        element("span", at, id="live", role="status"),
    )
