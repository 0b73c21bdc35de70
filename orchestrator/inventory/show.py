"""Shows an inventory to people and to scripts."""

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from orchestrator.contract.codec import encode
from orchestrator.inventory.hosts import Host, Inventory, natural, state_of
from orchestrator.inventory.profile import Profile

NAMED = 8
"""Number of unusual hosts per switch with a line each; the rest is only counted."""


def inventory_json(inventory: Inventory) -> dict[str, Any]:
    """`inventory` as `ndctl inventory --json` prints it."""
    profiles = {host.profile.name: host.profile for host in inventory.hosts if host.profile}
    return {
        "devices": sum(host.devices for host in inventory.hosts),
        "states": dict(Counter(host.state for host in inventory.hosts)),
        "profiles": {name: _profile_json(profile) for name, profile in profiles.items()},
        "hosts": [
            {
                "name": host.name,
                "devices": host.devices,
                "profile": host.profile.name if host.profile else None,
                "state": host.state,
                "reason": host.reason,
                "switches": list(host.switches),
                "nvlink_block": host.nvlink_block,
                "price_per_gpu_hour": host.price_per_gpu_hour,
            }
            for host in inventory.hosts
        ],
    }


def _profile_json(profile: Profile) -> dict[str, Any]:
    """The hardware, without the constants of the performance model."""
    return {key: value for key, value in encode(profile).items() if key != "calibration"}


def describe_inventory(inventory: Inventory) -> str:
    """`inventory` as a tree of switches: equal switches share a line, unusual hosts are named."""
    if not inventory.hosts:
        return "no hosts"
    usual = Counter(map(_kind, inventory.hosts)).most_common(1)[0][0]
    root = _Node(name="")
    for host in sorted(inventory.hosts, key=lambda host: natural(host.name)):
        block = [host.nvlink_block] if host.nvlink_block else []
        _reach(root, (*host.switches, *block)).hosts.append(host)
    devices = sum(host.devices for host in inventory.hosts)
    same = all(_kind(host) == usual for host in inventory.hosts)
    each = "each host has" if same else "most hosts have"
    head = f"{_count(inventory.hosts)}, {devices} devices; {each} {usual}"
    return "\n".join([head, *_links(inventory), *_below(root, usual, "")])


def _links(inventory: Inventory) -> Iterator[str]:
    """The link inside NVLink blocks, by profile."""
    profiles = {h.profile.name: h.profile for h in inventory.hosts if h.nvlink_block and h.profile}
    for name, profile in profiles.items():
        link = profile.intra_block or profile.intra_host
        of = f" of {name}" if len(profiles) > 1 else ""
        yield (
            f"NVLink blocks{of}: {link.kind}, {link.bytes_per_s / 1e9:g} GB/s per device and"
            f" direction, {link.latency_s * 1e6:g} us"
        )


@dataclass(slots=True)
class _Node:
    name: str
    children: dict[str, "_Node"] = field(default_factory=dict)
    hosts: list[Host] = field(default_factory=list)

    def all_hosts(self) -> Iterator[Host]:
        yield from self.hosts
        for child in self.children.values():
            yield from child.all_hosts()


def _reach(root: _Node, path: Sequence[str]) -> _Node:
    for name in path:
        root = root.children.setdefault(name, _Node(name=name))
    return root


def _kind(host: Host) -> str:
    profile = host.profile.name if host.profile else "devices of unknown kind"
    return f"{host.devices} x {profile}"


def _count(hosts: Sequence[Host]) -> str:
    """The number of hosts, by state."""
    states = Counter(host.state for host in hosts)
    many = f"{len(hosts)} host{'s' if len(hosts) > 1 else ''}"
    if len(states) == 1:
        return f"{many} {hosts[0].state}"
    return f"{many}: " + ", ".join(f"{count} {state}" for state, count in states.most_common())


def _below(node: _Node, usual: str, indent: str) -> Iterator[str]:
    children = sorted(node.children.values(), key=lambda child: natural(child.name))
    for _, same in itertools.groupby(children, key=lambda child: _shape(child, usual)):
        alike = list(same)
        first, last = alike[0], alike[-1]
        each = " each" if len(alike) > 1 else ""
        name = first.name if len(alike) == 1 else f"{first.name} … {last.name} ({len(alike)})"
        yield f"{indent}{name}  {_count(list(first.all_hosts()))}{each}{_names(alike)}"
        yield from _below(first, usual, indent + "  ")
    why = [_oddity(host, usual) for host in node.hosts]
    if why and _all_the_same(why) and node.hosts[0].state != "free":
        if why[0] != node.hosts[0].state:  # otherwise the switch's line names the state
            yield f"{indent}all {why[0]}"
        return
    odd = [f"{host.name}  {said}" for host, said in zip(node.hosts, why, strict=True) if said]
    yield from (f"{indent}{line}" for line in odd[:NAMED])
    if len(odd) > NAMED:
        yield f"{indent}and {len(odd) - NAMED} more that are not free or differ"


def _names(alike: Sequence[_Node]) -> str:
    """The first and the last host of leaf switches."""
    if not alike[0].hosts:
        return ""
    first, last = alike[0].hosts[0].name, alike[-1].hosts[-1].name
    return f"  {first}" if first == last else f"  {first} … {last}"


def _shape(node: _Node, usual: str) -> Any:
    """A key that is equal for switches whose lines differ in names only."""
    odd = [_oddity(host, usual) for host in node.hosts]
    if any(odd) and not _all_the_same(odd):
        return node.name
    return len(odd), odd[:1], tuple(_shape(child, usual) for child in node.children.values())


def _all_the_same(odd: Sequence[str]) -> bool:
    """A single host is always named."""
    return len(odd) > 1 and len(set(odd)) == 1


def _oddity(host: Host, usual: str) -> str:
    """How a host differs from the usual; empty where it does not."""
    parts: list[str] = [] if host.state == "free" else [state_of(host)]
    if _kind(host) != usual:
        parts.append(_kind(host))
    return ", ".join(parts)
