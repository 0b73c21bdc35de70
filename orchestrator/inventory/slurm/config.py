"""`scontrol show config`."""

import re
from collections.abc import Mapping

NUMBERED = re.compile(r"\[\d+\]$")


def parse_config(text: str) -> Mapping[str, str]:
    """Each setting's value, without those that it says `(null)` of.

    Newer versions number what may be there several times, as `Prolog[0]`: that is one value here,
    with commas.
    """
    found: dict[str, str] = {}
    for line in text.splitlines():
        key, equals, value = (part.strip() for part in line.partition("="))
        if equals and value != "(null)":
            name = NUMBERED.sub("", key)
            found[name] = f"{found[name]},{value}" if name != key and name in found else value
    return found
