"""The hosts of a cluster: their devices, their state, and the switches between them."""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Literal

from msgspec import Struct

from orchestrator.inventory.profile import Fabric, Profile

State = Literal[
    "free",
    "busy",
    "drained",
    "excluded",
    "not selected",
    "cordoned",
    "tainted",
    "not ready",
    "being deleted",
]
"""In the terms of the host's cluster: Slurm drains, Kubernetes cordons and taints."""


class Host(Struct, frozen=True, kw_only=True):
    name: str
    devices: int
    """Accelerators, or on a CPU cluster the ranks that the host runs."""
    device_bytes: int | None = None
    """Memory of one device; None where it is not known."""
    profile: Profile | None = None
    state: State = "free"
    """`busy` with another job; `drained`: its administrator or scheduler lets no job
    start there (a Kubernetes node is `cordoned`, `tainted`, ...); `excluded` by strikes, by a
    person or by the spec; `not selected`: it does not match the spec."""
    reason: str = ""
    """Why it is not free, if known."""
    switches: tuple[str, ...] = ()
    """From the outermost switch down to the host's own, as in `("spine-1", "leaf-3")`; empty where
    unknown."""
    nvlink_block: str | None = None
    """NVLink connects the devices of all hosts of a block, which share a switch. None where NVLink
    ends with the host. Names are unique in the inventory."""
    price_per_gpu_hour: float | None = None
    """Price of one device for an hour, in any currency; None where unknown."""


class Inventory(Struct, frozen=True, kw_only=True):
    hosts: tuple[Host, ...]

    def __post_init__(self) -> None:
        twice = [name for name, times in Counter(h.name for h in self.hosts).items() if times > 1]
        if twice:
            raise ValueError(f"host names must be unique, {', '.join(twice)} appears twice")

    def with_devices(self, devices: int) -> tuple[Host, ...]:
        """The hosts that a job with `devices` ranks per host may use, in natural order of names."""
        left_out = self.left_out(devices)
        able = [host for host in self.hosts if host.name not in left_out]
        return tuple(sorted(able, key=lambda host: natural(host.name)))

    def left_out(self, devices: int) -> dict[str, str]:
        """Host -> why a job with `devices` ranks per host does not use it.

        A job uses the most common kind of device only: with several kinds each step would wait for
        the slowest device, and the smallest memory would limit all.
        """
        reasons: dict[str, str] = {}
        for host in self.hosts:
            if host.state != "free":
                reasons[host.name] = f"is {state_of(host)}"
            elif host.devices < devices:
                reasons[host.name] = f"has {host.devices} of the {devices} devices needed"
        able = [host for host in self.hosts if host.name not in reasons]
        kinds = Counter(_kind(host) for host in able)
        if len(kinds) > 1:
            used, count = kinds.most_common(1)[0]
            for host in able:
                if _kind(host) != used:
                    others = f"{count} others are" if count > 1 else "another one is"
                    reasons[host.name] = f"is {_kind(host)}, and {others} {used}"
        return reasons

    def fabric(self, devices: int | None = None) -> Fabric | None:
        """The hardware for a job with `devices` ranks per host; None where no profile is known.

        Without `devices`, the number that most free hosts have. `hosts_per_leaf` is that of the
        median host.
        """
        if devices is None:
            sizes = Counter(host.devices for host in self.hosts if host.state == "free")
            devices = sizes.most_common(1)[0][0] if sizes else 1
        hosts = self.with_devices(devices)
        profile = hosts[0].profile if hosts else None
        if profile is None:
            return None
        return Fabric(
            profile=profile,
            hosts=len(hosts),
            devices_per_host=devices,
            hosts_per_leaf=_middle_leaf(hosts),
            blocks=_block_sizes(hosts),
        )

    def blocks(self, devices: int) -> tuple[int, ...]:
        """`Fabric.blocks` for a job with `devices` ranks per host."""
        if not any(host.nvlink_block for host in self.hosts):
            return ()
        return _block_sizes(self.with_devices(devices))


def grouped(reasons: Mapping[str, str], most: int) -> list[str]:
    """What each host lacks, hosts with the same reason together, at most `most` names each:
    `each of a-01, a-02 and 3 more is busy`."""
    by_reason: dict[str, list[str]] = {}
    for name, why in reasons.items():
        by_reason.setdefault(why, []).append(name)
    found = []
    for why, names in by_reason.items():
        if len(names) == 1:
            found.append(f"{names[0]} {why}")
            continue
        more = f" and {len(names) - most} more" if len(names) > most else ""
        found.append(f"each of {', '.join(names[:most])}{more} {why}")
    return found


def mean_price(inventory: Inventory, names: Collection[str]) -> float | None:
    """Mean price of a device of these hosts for an hour; None if one of them has no price."""
    chosen = set(names)
    prices = [host.price_per_gpu_hour for host in inventory.hosts if host.name in chosen]
    known = [price for price in prices if price is not None]
    return sum(known) / len(known) if known and len(known) == len(prices) else None


def state_of(host: Host) -> str:
    """The state, with the reason if known."""
    return f"{host.state} ({host.reason})" if host.reason else host.state


def _kind(host: Host) -> str:
    return host.profile.name if host.profile else "of unknown kind"


def _middle_leaf(hosts: Sequence[Host]) -> int | None:
    """The number of `hosts` on the median host's leaf switch."""
    if not all(host.switches for host in hosts):
        return None
    leaves = Counter(host.switches for host in hosts)
    seen = sorted(leaves[host.switches] for host in hosts)
    return seen[len(seen) // 2]


def _block_sizes(hosts: Iterable[Host]) -> tuple[int, ...]:
    """Hosts per NVLink block, the largest first; blocks as in `tree_of`."""
    sizes = Counter(
        (host.switches, host.nvlink_block, host.nvlink_block or host.name) for host in hosts
    )
    found = tuple(sorted(sizes.values(), reverse=True))
    return found if found[:1] > (1,) else ()


def natural(name: str) -> tuple[tuple[str, int], ...]:
    """A sorting key that puts host-2 before host-10."""
    parts = re.findall(r"(\D*)(\d*)", name)
    return (*((text, int(number or -1)) for text, number in parts), (name, 0))


def tree_of(hosts: Iterable[Host]) -> dict[str, tuple[str, ...]]:
    """Host -> its switches, for hosts whose switches are known.

    With NVLink blocks, the last entry is the host's block, and a host in no block is its own block.
    All entries then have the same length.
    """
    hosts = tuple(hosts)
    if not any(host.nvlink_block for host in hosts):
        return {host.name: host.switches for host in hosts if host.switches}
    depth = 1 + max(len(host.switches) for host in hosts)
    return {
        host.name: (
            *host.switches,
            *[host.nvlink_block or host.name] * (depth - len(host.switches)),
        )
        for host in hosts
    }
