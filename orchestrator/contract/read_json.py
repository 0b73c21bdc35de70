"""JSON that another process wrote: one value, or a ValueError for any other text.

`json.loads` also raises RecursionError, for example for `[[[…`. It also returns values that are so
deep that printing or encoding them raises RecursionError later. Nothing that ndctl reads is deep,
so depth is limited here.
"""

import json
import re
from typing import Any

_TOO_DEEP = "its lists and objects are nested too deep"
MOST_DEPTH = 64
"""Lists and objects inside each other; an event with its plan has nine levels."""


def read_json(
    text: str | bytes | bytearray, *, most: int | None = None, unique_keys: bool = False
) -> Any:
    """The value of `text`.

    Args:
        most: the largest number of characters or bytes that is accepted.
        unique_keys: refuse an object that has a key twice. Otherwise the last value counts.

    Raises:
        ValueError: it is not JSON, or longer or deeper than a value that ndctl wrote.
    """
    if most is not None and len(text) > most:
        raise ValueError(f"it has {len(text):,} characters, and at most {most:,} are read")
    try:
        # Ruff bans json.loads elsewhere: other modules call this function.
        value = json.loads(text, object_pairs_hook=_unique if unique_keys else None)  # noqa: TID251
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    # Counting brackets is much faster than a walk through the value, and most texts have few.
    if _opened(text) > MOST_DEPTH and not _is_shallow(value):
        raise ValueError(_TOO_DEEP)
    return value


def read_json_values(text: str) -> list[Any]:
    """The values of `text`, which may be several, one after the other.

    Raises:
        ValueError: one of them is not JSON, or too deep.
    """
    values: list[Any] = []
    decoder, at = json.JSONDecoder(), 0
    while (found := NOT_SPACE.search(text, at)) is not None:
        try:
            value, at = decoder.raw_decode(text, found.start())
        except RecursionError:
            raise ValueError(_TOO_DEEP) from None
        if not _is_shallow(value):
            raise ValueError(_TOO_DEEP)
        values.append(value)
    return values


NOT_SPACE = re.compile(r"[^ \t\r\n]")
"""JSON has no other spaces."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for key, item in pairs:
        if key in value:
            raise ValueError(f"the key {key[:100]!r} occurs twice")
        value[key] = item
    return value


def _opened(text: str | bytes | bytearray) -> int:
    """The number of opening brackets: an upper limit of the depth, as strings may have some too."""
    if isinstance(text, str):
        return text.count("[") + text.count("{")
    return text.count(b"[") + text.count(b"{")


def _is_shallow(value: Any) -> bool:
    level = [value]
    for _ in range(MOST_DEPTH):
        level = [item for holder in level for item in _children(holder)]
        if not level:
            return True
    return False


def _children(holder: Any) -> list[Any]:
    items = holder.values() if isinstance(holder, dict) else holder
    return [item for item in items if isinstance(item, dict | list)]
