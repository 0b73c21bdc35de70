"""Memory as stacked bars, scaled to the memory of a device."""

from collections.abc import Mapping, Sequence
from itertools import groupby

from orchestrator.contract.plan import Memory
from orchestrator.plan.figures import show_bytes
from orchestrator.plan.show.tables import wrapped

FREE = "."
BAR = 60
SHOWN = 8
"""Bars; of more kinds of ranks, the fullest are drawn."""
MARKS = {
    "parameters": "P",
    "gradients": "G",
    "optimizer": "O",
    "gathered": "W",
    "activations": "A",
    "logits": "L",
}
"""Letters in a bar; any other item takes the first free letter of its name."""


def bars(memories: Sequence[Memory]) -> list[str]:
    """A bar per kind of rank, and a legend with the sizes on the fullest rank."""
    fullest = max(memories, key=lambda memory: memory.peak_bytes)
    marks = marks_of({item: size for memory in memories for item, size in memory.items.items()})
    whole = max(fullest.device_bytes or 0, fullest.peak_bytes, 1)
    kinds = kinds_of(memories)
    shown = dict(sorted(kinds.items(), key=lambda kind: -kind[1].peak_bytes)[:SHOWN])
    wide = max(map(len, shown))
    lines = []
    for label, memory in kinds.items():
        if label in shown:
            drawn = stacked(memory, marks, whole).ljust(BAR, FREE)
            of = f" of {show_bytes(memory.device_bytes)}" if memory.device_bytes else ""
            lines.append(f"  {label:<{wide}} [{drawn}] {show_bytes(memory.peak_bytes)}{of}")
    if len(shown) < len(kinds):
        lines.append(f"  … and {len(kinds) - len(shown)} with less")
    items = sorted(fullest.items.items(), key=lambda pair: -pair[1])
    legend = ", ".join(f"{marks[item]} {item} {show_bytes(size)}" for item, size in items if size)
    where = "on the fullest rank: " if len(kinds) > 1 else ""
    return [*lines, *wrapped(where + legend + _scaled(fullest), "  ", "  ")]


def kinds_of(memories: Sequence[Memory]) -> dict[str, Memory]:
    """Groups neighbours that need the same memory, as in `pp stage 1-6`."""
    kinds = {}
    for _, same in groupby(memories, key=lambda memory: (memory.peak_bytes, memory.items)):
        first, *others = same
        last = others[-1].worst_rank.rpartition(" ")[2] if others else ""
        kinds[f"{first.worst_rank}-{last}" if last else first.worst_rank] = first
    return kinds


def _scaled(memory: Memory) -> str:
    """Items peak at different times, so their sum may be more than the peak of the rank."""
    together = sum(memory.items.values())
    if show_bytes(together) == show_bytes(memory.peak_bytes):
        return ""
    return (
        f"; these are the items' own peaks, which add up to {show_bytes(together)} but do not"
        " coincide: the bar is scaled to the peak of the rank"
    )


def stacked(memory: Memory, marks: Mapping[str, str], whole: int) -> str:
    """A bar whose length is the peak's share of `whole`, divided in proportion to the items."""
    scale = memory.peak_bytes / max(1, sum(memory.items.values())) / whole
    drawn, so_far = "", 0
    for item, size in memory.items.items():
        so_far += size
        drawn += marks[item] * (round(BAR * so_far * scale) - len(drawn))
    return drawn


def marks_of(items: Mapping[str, int]) -> dict[str, str]:
    marks: dict[str, str] = {}
    for item in items:
        letters = [MARKS.get(item, ""), *item.upper(), *item, *"0123456789"]
        marks[item] = next(one for one in letters if one.isalnum() and one not in marks.values())
    return marks
