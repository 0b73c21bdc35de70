"""What a browser would find in a page, without one."""

from dataclasses import dataclass, field
from html.parser import HTMLParser

from orchestrator.web.pages.document import document
from orchestrator.web.pages.page import Page

TAGS = """
html head meta title link script body header main section nav div span p a b i h2 dl dt dd
ol li time table thead tbody tr th td code pre figure input form details summary button
"""
ATTRIBUTES = """
lang charset name content rel href src defer data-live class id role data-block data-key type
placeholder aria-label autocomplete scope title method action value
"""
VOID = ("meta", "link", "input")


@dataclass
class Found(HTMLParser):
    """Elements and texts of a page. Anything that ndctl does not write raises an error."""

    texts: list[str] = field(default_factory=list)
    attributes: list[tuple[str, str, str]] = field(default_factory=list)
    """Element, attribute, value."""
    open: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(convert_charrefs=True)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in TAGS.split(), tag
        for name, value in attrs:
            assert name in ATTRIBUTES.split(), name
            self.attributes.append((tag, name, value or ""))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    @property
    def text(self) -> str:
        return "\n".join(self.texts)

    def values(self, attribute: str) -> list[str]:
        return [value for _, name, value in self.attributes if name == attribute]


def parsed(html: str) -> Found:
    found = Found()
    found.feed(html)
    found.close()
    assert found.open == []
    return found


def parsed_page(page: Page) -> Found:
    return parsed(document(page, "1", "as of now", "/live/").decode())
