"""Several values for keys of a spec, `KEY=A,B`, as what `--set` takes."""

from collections.abc import Sequence
from itertools import product


def combinations(keys: Sequence[str]) -> list[tuple[str, ...]]:
    """Every combination of the values of `KEY=A,B` each; those of the last key change first."""
    pairs = [one.partition("=")[::2] for one in keys]
    return list(product(*([f"{key}={value}" for value in values_of(said)] for key, said in pairs)))


def values_of(text: str) -> list[str]:
    """`A,B` as its values; a comma inside of brackets or quotes is part of one."""
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
