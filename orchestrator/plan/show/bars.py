"""Memory as stacked bars against what a device has."""

from collections.abc import Mapping, Sequence

from orchestrator.contract.plan import Memory
from orchestrator.plan.figures import show_bytes
from orchestrator.plan.show.tables import WIDTH, wrapped

FREE = "."
BAR = 60
MARKS = {
    "parameters": "P",
    "gradients": "G",
    "optimizer": "O",
    "gathered": "W",
    "activations": "A",
    "logits": "L",
}
"""Letters of the items that a bar is made of; any other takes the first free one of its name."""


def bars(memories: Sequence[Memory]) -> list[str]:
    """A line for each kind of rank, and what its letters mean."""
    marks = marks_of({item: size for memory in memories for item, size in memory.items.items()})
    whole = max(max(memory.device_bytes or 0, memory.peak_bytes, 1) for memory in memories)
    label = max(len(memory.worst_rank) for memory in memories)
    lines = []
    for memory in memories:
        cells = stacked(memory, marks, whole)
        of = f" of {show_bytes(memory.device_bytes)}" if memory.device_bytes else ""
        drawn = cells.ljust(BAR, FREE)
        size = show_bytes(memory.peak_bytes)
        lines.append(f"  {memory.worst_rank:<{label}} [{drawn}] {size}{of}"[: WIDTH + 20])
    fullest = max(memories, key=lambda memory: memory.peak_bytes)
    items = sorted(fullest.items.items(), key=lambda pair: -pair[1])
    legend = ", ".join(f"{marks[item]} {item} {show_bytes(size)}" for item, size in items if size)
    return [*lines, *wrapped(legend + _scaled(fullest), "  ", "  ")]


def _scaled(memory: Memory) -> str:
    """What the items of a bar are, where they add up to more than the peak."""
    together = sum(memory.items.values())
    if show_bytes(together) == show_bytes(memory.peak_bytes):
        return ""
    return (
        f"; each at its own most, {show_bytes(together)} in all, which are never there at once: the"
        " bar has them scaled to the peak"
    )


def stacked(memory: Memory, marks: Mapping[str, str], whole: int) -> str:
    """Each item as long as its share; together as long as the peak's share of `whole`, at which not
    all of them are at their own."""
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
