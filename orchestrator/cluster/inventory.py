"""The hosts that there are."""

import re
from collections import Counter
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    name: str
    devices: int
    """Accelerators, or on a CPU cluster the ranks that the host plays."""
    device_bytes: int | None = None
    """Memory of one device; None where it is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    hosts: tuple[Host, ...]

    def __post_init__(self) -> None:
        twice = [name for name, times in Counter(h.name for h in self.hosts).items() if times > 1]
        if twice:
            raise ValueError(f"host names must be unique, {', '.join(twice)} is there twice")

    def with_devices(self, devices: int) -> tuple[Host, ...]:
        """The hosts with at least so many devices, in natural order of their names."""
        able = [host for host in self.hosts if host.devices >= devices]
        return tuple(sorted(able, key=lambda host: natural(host.name)))


def natural(name: str) -> tuple[tuple[str, int], ...]:
    """A sorting key that puts host-2 before host-10."""
    parts = re.findall(r"(\D*)(\d*)", name)
    return (*((text, int(number or -1)) for text, number in parts), (name, 0))
