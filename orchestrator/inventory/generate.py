"""Generates large inventories: regular ones, as in the short form of a file, and worn ones."""

import random
from collections.abc import Sequence

from msgspec.structs import replace

from orchestrator.inventory.hosts import Host, Inventory
from orchestrator.inventory.profile import Profile

LEVELS = ("leaf", "spine", "core")
"""Levels of switches, innermost first."""


def regular(
    profile: Profile | None,
    hosts: int,
    devices_per_host: int,
    hosts_per: Sequence[int] = (),
    hosts_per_block: int | None = None,
    price_per_gpu_hour: float | None = None,
) -> Inventory:
    """Equal, free hosts: `hosts_per_block` in an NVLink block, and `hosts_per` below a leaf, a
    spine and a core. Each number must be a multiple of the one before it.
    """
    digits = len(str(hosts))
    return Inventory(
        hosts=tuple(
            Host(
                name=f"host-{number:0{digits}}",
                devices=devices_per_host,
                device_bytes=profile.memory_bytes if profile else None,
                profile=profile,
                switches=_switches(number - 1, hosts_per),
                nvlink_block=_block(number - 1, hosts_per_block),
                price_per_gpu_hour=price_per_gpu_hour,
            )
            for number in range(1, hosts + 1)
        )
    )


def _block(number: int, hosts_per_block: int | None) -> str | None:
    return f"nvlink-block-{number // hosts_per_block + 1}" if hosts_per_block else None


def _switches(number: int, hosts_per: Sequence[int]) -> tuple[str, ...]:
    """Switches of a host, numbered from 0; outermost first."""
    below = zip(LEVELS, hosts_per, strict=False)
    return tuple(f"{level}-{number // size + 1}" for level, size in below)[::-1]


def worn(inventory: Inventory, seed: int, share: float = 0.1) -> Inventory:
    """`inventory` after some time: about `share` of its hosts are busy, drained or lack a
    device."""
    rng = random.Random(seed)
    return Inventory(hosts=tuple(_worn(host, rng, share) for host in inventory.hosts))


def _worn(host: Host, rng: random.Random, share: float) -> Host:
    if rng.random() >= share:
        return host
    match rng.randrange(3):
        case 0:
            return replace(host, state="busy")
        case 1:
            return replace(host, state="drained")
        case _:
            return replace(host, devices=max(0, host.devices - 1))
