"""JSON that another process wrote: one value, or a ValueError, whatever the text is.

`json.loads` also raises RecursionError, for `[[[…`, and returns values so deep that to print or to
encode them raises it later. Nothing that ndctl reads is deep, so depth is limited here.
"""

import json
from typing import Any

_TOO_DEEP = "its lists and objects are nested too deep"
MOST_DEPTH = 64
"""Lists and objects within each other; an event with its plan has nine."""


def read_json(text: str | bytes | bytearray, *, most: int | None = None) -> Any:
    """The value of `text`.

    Args:
        most: characters or bytes that it may have.

    Raises:
        ValueError: it is not JSON, or longer or deeper than a value that ndctl wrote.
    """
    if most is not None and len(text) > most:
        raise ValueError(f"it has {len(text):,} characters, and at most {most:,} are read")
    try:
        value = json.loads(text)  # noqa: TID251 - this is the one place
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    # To count brackets is much faster than to walk, and short lines are never deep.
    if _opened(text) > MOST_DEPTH and not _is_shallow(value):
        raise ValueError(_TOO_DEEP)
    return value


def _opened(text: str | bytes | bytearray) -> int:
    """How many lists and objects `text` can begin at most; more where a string has brackets."""
    if isinstance(text, str):
        return text.count("[") + text.count("{")
    return text.count(b"[") + text.count(b"{")


def _is_shallow(value: Any) -> bool:
    level = [value]
    for _ in range(MOST_DEPTH):
        level = [item for holder in level for item in _inside(holder)]
        if not level:
            return True
    return False


def _inside(holder: Any) -> list[Any]:
    """The lists and objects directly in it."""
    items = holder.values() if isinstance(holder, dict) else holder
    return [item for item in items if isinstance(item, dict | list)]
