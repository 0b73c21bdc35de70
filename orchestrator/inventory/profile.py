"""What a device can do, and the links around it: vendors' numbers, each with its source."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal, get_args

from orchestrator.contract.codec import Invalid, Problem
from orchestrator.contract.spec.limits import Above, AtLeast, AtMost
from orchestrator.inventory.calibration import Calibration

LinkKind = Literal[
    "nvlink3",
    "nvlink4",
    "nvlink5",
    "pcie4",
    "pcie4 via host",
    "pcie5",
    "infiniband",
    "ethernet",
    "shared memory",
]
"""What a link is, which tells how much of its rate a collective gets out of it. `via host` is PCIe
between devices that cannot reach each other's memory: through a buffer of the host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    kind: LinkKind
    bytes_per_s: Annotated[float, Above(0)]
    """Of one device, in one direction: the rate of the link, not what a collective gets of it."""
    latency_s: Annotated[float, Above(0)]
    """Of one message, or of one step of a ring."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    name: str
    device: Literal["cuda", "cpu"]
    memory_bytes: Annotated[int, AtLeast(1)]
    """What a process sees as the whole of it; vendors' gigabytes are more."""
    flops: Mapping[str, Annotated[float, Above(0)]]
    """Dense peak in operations a second, by type: `float32` (without TF32), `bfloat16`, `float8`
    where it has that."""
    memory_bytes_per_s: Annotated[float, Above(0)]
    intra_host: Link
    """Between devices of a host."""
    inter_host: Link
    """Between hosts, as one device's share."""
    calibration: Calibration
    """What is left of these rates in use; a file leaves it out, and the reader lays it in."""
    intra_block: Link | None = None
    """Between devices of hosts in one NVLink block; None where it is as inside a host."""
    power_w: Annotated[int, AtLeast(1)] | None = None
    """The limit that these figures hold under; None where nobody says."""
    sustained: Annotated[float, Above(0), AtMost(1)] | None = None
    """What the best large matrix multiplication in bfloat16 holds of the peak under that limit, as
    measured; None where nobody did."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """Of each number, by its path, for example `intra_host.bytes_per_s`."""

    def __post_init__(self) -> None:
        missing = [kind for kind in ("float32", "bfloat16") if kind not in self.flops]
        unknown = [kind for kind in self.flops if kind not in ("float32", "bfloat16", "float8")]
        raise_for(
            [
                Problem(
                    path=f"flops.{kind}",
                    limit="given",
                    fix=f"add flops.{kind}: operations a second",
                )
                for kind in missing
            ]
            + [
                Problem(
                    path=f"flops.{kind}",
                    value=kind,
                    limit="one of float32, bfloat16, float8",
                    fix="remove it; float16 runs at the rate of bfloat16",
                )
                for kind in unknown
            ]
            + [
                Problem(
                    path=f"calibration.links.{kind}",
                    value=kind,
                    limit=f"one of {', '.join(get_args(LinkKind))}",
                    fix="remove it, or name the link as the profile does",
                )
                for kind in self.calibration.links
                if kind not in get_args(LinkKind)
            ]
        )


def raise_for(problems: list[Problem]) -> None:
    if problems:
        raise Invalid(problems)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fabric:
    """The cluster as a plan sees it before hosts are chosen: all alike."""

    profile: Profile
    hosts: int
    devices_per_host: int
    hosts_per_leaf: int | None = None
    """Hosts under one leaf switch; None where nobody says."""
    blocks: tuple[int, ...] = ()
    """Hosts of each NVLink block that a job may use, the largest first; a host in none is a block
    of 1. Empty where NVLink ends with the host everywhere."""

    @property
    def hosts_per_block(self) -> int:
        """Of the block that the job's host in the middle is in, should it take the largest: no tp
        group that these hold is larger (`blocks_hold`)."""
        seen = itertools.accumulate(self.blocks)
        enough = next((n for n, hosts in enumerate(seen, 1) if hosts >= self.hosts), None)
        taken = self.blocks[:enough]
        left = sum(taken) // 2
        for size in taken:
            left -= size
            if left < 0:
                return size
        return 1

    @property
    def block_link(self) -> Link:
        return self.profile.intra_block or self.profile.intra_host


def blocks_hold(blocks: Sequence[int], wide: int, hosts: int) -> bool:
    """Whether `hosts` can be taken in groups of `wide`, none of which leaves its block, of blocks
    of these sizes."""
    return sum(size // wide for size in blocks) * wide >= hosts
