"""Parses generic resources, such as `gpu:h100:8(S:0-1),nvme:1`."""

import re
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache

from msgspec import Struct

ENTRY = re.compile(r"(?:[^,(]|\([^)]*\))+")
UNITS = {"": 1, "K": 1024, "M": 1024**2, "G": 1024**3, "T": 1024**4}
COUNT = re.compile(r"(\d+)([KMGT]?)")


class Gres(Struct, frozen=True, kw_only=True):
    name: str
    type: str | None
    count: int


@lru_cache(maxsize=4096)  # thousands of nodes have few kinds
def parse_gres(text: str) -> tuple[Gres, ...]:
    """From a node's `Gres=` or `GresUsed=`. Entries that cannot be read are ignored."""
    return tuple(_entries(text)) if text and text != "(null)" else ()


def _entries(text: str) -> Iterator[Gres]:
    for entry in ENTRY.findall(text):
        # gpu:(null):2(IDX:0-1): "(null)" is the type; the parentheses at the end are detail
        plain = re.sub(r"\([^)]*\)$", "", entry.replace("(null)", ""))
        name, *rest = plain.split(":")
        last = COUNT.fullmatch(rest[-1]) if rest else None
        kinds = [part for part in (rest[:-1] if last else rest) if part and part != "no_consume"]
        count = int(last[1]) * UNITS[last[2]] if last else 1
        yield Gres(name=name, type=kinds[0] if kinds else None, count=count)


@lru_cache(maxsize=4096)
def gpu_count(entries: tuple[Gres, ...]) -> int:
    return sum(one.count for one in entries if one.name == "gpu")


@lru_cache(maxsize=4096)
def gpu_type(entries: tuple[Gres, ...]) -> str | None:
    """Type of most of the GPUs; None if no entry has a type."""
    counts: Counter[str] = Counter()
    for one in entries:
        if one.name == "gpu" and one.type:
            counts[one.type] += one.count
    return counts.most_common(1)[0][0] if counts else None


@lru_cache(maxsize=4096)
def gpus_of_tres(text: str) -> int | None:
    """From `cpu=8,mem=1G,gres/gpu=2,gres/gpu:h100=2`; None if GPUs are not counted there."""
    typed = [int(found[1]) for found in re.finditer(r"(?:^|,)gres/gpu:[^=,]*=(\d+)", text)]
    whole = re.search(r"(?:^|,)gres/gpu=(\d+)", text)
    if whole:
        return int(whole[1])
    return sum(typed) if typed else None
