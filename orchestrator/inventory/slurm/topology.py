"""Parses `scontrol show topology`: a tree of switches, or blocks; and the part of an allocation."""

from collections.abc import Iterable, Mapping
from typing import Literal

from msgspec import Struct, field

from orchestrator.inventory.slurm.hostlist import expand
from orchestrator.inventory.slurm.records import records, value


class Topology(Struct, frozen=True, kw_only=True):
    kind: Literal["tree", "block", "flat"] = "flat"
    switches: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Host -> its switches, outermost first; empty for a block topology."""
    blocks: Mapping[str, str] = field(default_factory=dict)
    """Host -> its block."""


def parse_topology(text: str) -> Topology:
    """If a host is in two leaves or two blocks, the first one counts."""
    blocks = _blocks(text)
    switches = _switches(text)
    if blocks:
        return Topology(kind="block", blocks=blocks, switches=switches)
    return Topology(kind="tree", switches=switches) if switches else Topology()


def _blocks(text: str) -> dict[str, str]:
    """Blocks that combine other blocks (`AggregatedBlock=`) add no information."""
    found: dict[str, str] = {}
    for record in records(text, "BlockName"):
        name = value(record, "BlockName")
        for host in expand(value(record, "Nodes")):
            found.setdefault(host, name)
    return found


def _switches(text: str) -> dict[str, tuple[str, ...]]:
    above: dict[str, str] = {}
    hosts: dict[str, str] = {}
    for record in records(text, "SwitchName"):
        name = value(record, "SwitchName")
        below = expand(value(record, "Switches"))
        for switch in below:
            above.setdefault(switch, name)
        if not below:  # a switch above other switches repeats their nodes
            for host in expand(value(record, "Nodes")):
                hosts.setdefault(host, name)
    paths = {leaf: _path(leaf, above) for leaf in set(hosts.values())}
    return {host: paths[leaf] for host, leaf in hosts.items()}


def _path(leaf: str, above: Mapping[str, str]) -> tuple[str, ...]:
    path = [leaf]
    while (upper := above.get(path[-1])) is not None and upper not in path:
        path.append(upper)
    return tuple(reversed(path))


def switches_of(topology: Topology, hosts: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """`Allocation.switches` for the `hosts` that are below a switch or in a block. The block is
    then the innermost switch."""
    found = {}
    for host in hosts:
        path = topology.switches.get(host, ())
        block = topology.blocks.get(host)
        if path or block:
            found[host] = (*path, block) if block else path
    return found


def allocated_switches(nodelist: str, topology: str) -> dict[str, tuple[str, ...]]:
    """`switches_of` for a leader: from SLURM_JOB_NODELIST and `scontrol show topology`."""
    return switches_of(parse_topology(topology), expand(nodelist))
