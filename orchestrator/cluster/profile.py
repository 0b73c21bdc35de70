"""What a device can do, and the links around it: vendors' numbers, each with its source."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    kind: str
    """`nvlink4`, `pcie4`, `infiniband`, `ethernet`, `shared memory`."""
    bytes_per_s: float
    """Of one device, in one direction."""
    latency_s: float
    """Of one message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    name: str
    device: Literal["cuda", "cpu"]
    memory_bytes: int
    flops: Mapping[str, float]
    """Dense peak in operations a second, by type: `float32`, `bfloat16`, `float8` where it has
    that."""
    memory_bytes_per_s: float
    intra_host: Link
    """Between devices of a host."""
    inter_host: Link
    """Between hosts, as one device's share."""
    sources: Mapping[str, str]
    """Of each number, by its path, for example `intra_host.bytes_per_s`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fabric:
    """The cluster as a plan sees it before hosts are chosen: all alike."""

    profile: Profile
    hosts: int
    devices_per_host: int
    hosts_per_leaf: int | None = None
    """Hosts under one leaf switch, or in one NVLink block; None where nobody says."""
