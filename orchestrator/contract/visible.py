"""Text that another program or person wrote, made safe to show.

A terminal executes escape sequences, and bidirectional control characters change the order in which
words appear. A log line, the name of a process group in a dump or a key of a spec may contain both.
All such text passes through `visible` before it is shown.

Only the standard library is used, because every part of ndctl may import this module.
"""

import re
from typing import Any

_COLOUR = re.compile(r"(?:\x1b\[|\x9b)[0-9;:]*m")
"""A colour changes only how text looks, and most logs have colours, so colours are dropped."""
_HIDDEN = re.compile(
    "["
    "\x00-\x08\x0b-\x1f\x7f-\x9f"  # controls except tab and newline: ESC, the 8-bit CSI, …
    "\u00ad\u0600-\u0605\u061c\u06dd\u070f\u0890\u0891\u08e2\u180e"  # format characters of scripts
    "\u200b-\u200f\u2028-\u202e\u2060-\u2064\u2066-\u206f"  # zero width, separators, direction
    "\ufeff\ufff9-\ufffb"
    "\ud800-\udfff"  # lone surrogates, which no stream can encode
    "\U000110bd\U000110cd\U00013430-\U00013438\U0001bca0-\U0001bca3\U0001d173-\U0001d17a"
    "\U000e0001\U000e0020-\U000e007f"  # tags: invisible text
    "]"
)
_BREAKS = re.compile("[\t\n]")
TAB = "    "


def visible(text: str, *, keep: str = "\n") -> str:
    """`text` with each control character written out, such as `\\x1b` or `\\u202e`.

    Args:
        keep: which of newline and tab stay as they are. Other newlines are written out. Other tabs
            become spaces, because tabs only affect layout.
    """
    if text.isascii() and text.isprintable():  # nearly all text, and views have thousands of names
        return text
    text = _HIDDEN.sub(_written_out, _COLOUR.sub("", text).replace("\r\n", "\n"))
    return _BREAKS.sub(lambda found: found[0] if found[0] in keep else _break(found[0]), text)


def _break(char: str) -> str:
    return TAB if char == "\t" else "\\n"


def _written_out(found: re.Match[str]) -> str:
    code = ord(found[0])
    if code == ord("\r"):
        return "\\r"
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


class VisibleStream:
    """A text stream that writes everything through `visible`."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    @property
    def unwrapped(self) -> Any:
        """The stream itself, for text that is visible already."""
        return self._stream

    def write(self, text: str) -> int:
        self._stream.write(visible(text, keep="\n\t"))
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
