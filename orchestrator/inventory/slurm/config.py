"""`scontrol show config`."""

import re
from collections.abc import Mapping

NUMBERED = re.compile(r"\[\d+\]$")


def parse_config(text: str) -> Mapping[str, str]:
    """Setting -> value, without settings that are `(null)`.

    Newer versions number settings that can occur several times, such as `Prolog[0]`: these become
    one value, joined by commas.
    """
    found: dict[str, str] = {}
    for line in text.splitlines():
        key, equals, value = (part.strip() for part in line.partition("="))
        if equals and value != "(null)":
            name = NUMBERED.sub("", key)
            found[name] = f"{found[name]},{value}" if name != key and name in found else value
    return found
