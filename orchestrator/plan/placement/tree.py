"""The tree of switches above hosts, with integers instead of names."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from msgspec import Struct


@dataclass(slots=True)
class Switch:
    """A switch with child switches or, if it is a leaf, with hosts."""

    children: list["Switch"] = field(default_factory=list)
    hosts: list[int] = field(default_factory=list)
    """Numbers of the hosts in the tree."""

    @property
    def size(self) -> int:
        return len(self.hosts) + sum(child.size for child in self.children)


class Tree(Struct, frozen=True):
    names: tuple[str, ...]
    above: tuple[tuple[int, ...], ...]
    """For each level, leaves first: the number of the switch above each host."""
    root: Switch

    @property
    def height(self) -> int:
        return len(self.above)


def tree_over(names: Sequence[str], switches: Mapping[str, tuple[str, ...]]) -> Tree:
    """The tree over the hosts `names`, in this order.

    Its depth follows from all of `switches`, so it does not depend on the chosen hosts. A host with
    a shorter path than others, or with unknown switches, gets switches of its own.
    """
    paths = [switches.get(name, ()) for name in names]
    depth = max(map(len, switches.values()), default=0)
    prefixes = [
        [(*path, *[("", name)] * (depth - len(path)))[:size] for size in range(1, depth + 1)]
        for name, path in zip(names, paths, strict=True)
    ]
    above = []
    for level in reversed(range(depth)):
        numbers: dict[tuple[object, ...], int] = {}
        above.append(tuple(numbers.setdefault(prefix[level], len(numbers)) for prefix in prefixes))
    return Tree(names=tuple(names), above=tuple(above), root=_switch(range(len(names)), above))


def _switch(hosts: Sequence[int], above: Sequence[Sequence[int]]) -> Switch:
    if not above:
        return Switch(hosts=list(hosts))
    parts: dict[int, list[int]] = {}
    for host in hosts:
        parts.setdefault(above[-1][host], []).append(host)
    return Switch(children=[_switch(part, above[:-1]) for part in parts.values()])
