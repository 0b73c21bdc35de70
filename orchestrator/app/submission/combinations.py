"""Combinations of several values for keys of a spec, in the form that `--set` takes."""

from collections.abc import Sequence
from itertools import product


def combinations(keys: Sequence[str]) -> list[tuple[str, ...]]:
    """All combinations of the values of items like `KEY=A,B`. The last key changes first."""
    pairs = [one.partition("=")[::2] for one in keys]
    return list(product(*([f"{key}={value}" for value in values_of(said)] for key, said in pairs)))


def values_of(text: str) -> list[str]:
    """The values in `A,B`. A comma inside brackets or quotes is part of a value."""
    found, depth, quote = [""], 0, ""
    for char in text:
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        else:
            depth += (char in "[{") - (char in "]}")
        if char == "," and not quote and depth == 0:
            found.append("")
        else:
            found[-1] += char
    return found
