"""Rates of a device and its links: vendors' numbers, each with its source."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal, get_args

from msgspec import Struct, field

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
    "infinity fabric",
    "infiniband",
    "ethernet",
    "shared memory",
]
"""The kind of a link decides how much of its rate a collective reaches. `via host`: PCIe between
devices without peer access, through a buffer in host memory."""


class Link(Struct, frozen=True, kw_only=True):
    kind: LinkKind
    bytes_per_s: Annotated[float, Above(0)]
    """Link rate of one device in one direction; a collective reaches less."""
    latency_s: Annotated[float, Above(0)]
    """Latency of one message, or of one step of a ring."""


class Profile(Struct, frozen=True, kw_only=True):
    name: str
    device: Literal["cuda", "cpu"]
    memory_bytes: Annotated[int, AtLeast(1)]
    """Total memory as a process sees it, less than the vendor's figure."""
    flops: Mapping[str, Annotated[float, Above(0)]]
    """Dense peak in operations per second, by type: `float32` (without TF32), `bfloat16`, `float8`
    where it has that."""
    memory_bytes_per_s: Annotated[float, Above(0)]
    intra_host: Link
    """Between devices of a host."""
    inter_host: Link
    """Between hosts, as one device's share."""
    calibration: Calibration
    """Share of these rates that is reached in practice. The reader adds it to a profile file."""
    intra_block: Link | None = None
    """Between devices of hosts in one NVLink block; None: the same link as inside a host."""
    power_w: Annotated[int, AtLeast(1)] | None = None
    """Power limit for which these figures hold; None where unknown."""
    sustained: Annotated[float, Above(0), AtMost(1)] | None = None
    """Measured share of the peak that the best large bfloat16 matrix multiplication sustains; None
    where unmeasured."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """Source of each number, by its path, for example `intra_host.bytes_per_s`."""

    def __post_init__(self) -> None:
        missing = [kind for kind in ("float32", "bfloat16") if kind not in self.flops]
        unknown = [kind for kind in self.flops if kind not in ("float32", "bfloat16", "float8")]
        raise_for(
            [
                Problem(
                    path=f"flops.{kind}",
                    limit="given",
                    fix=f"add flops.{kind}: operations per second",
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
            + self._unknown_attention()
        )

    def _unknown_attention(self) -> list[Problem]:
        known, given = self.calibration.kernels, self.calibration.attention
        if given in known:
            return []
        limit = f"one of {', '.join(known)}"
        fix = "name one of them, or describe the kernel in calibration.kernels"
        return [Problem(path="calibration.attention", value=given, limit=limit, fix=fix)]


def raise_for(problems: list[Problem]) -> None:
    if problems:
        raise Invalid(problems)


class Fabric(Struct, frozen=True, kw_only=True):
    """The cluster before hosts are chosen: all hosts are alike."""

    profile: Profile
    hosts: int
    devices_per_host: int
    hosts_per_leaf: int | None = None
    """Hosts under one leaf switch; None where unknown."""
    blocks: tuple[int, ...] = ()
    """Usable hosts of each NVLink block, the largest first; a host in no block counts as a block of
    1. Empty where NVLink always ends with the host."""

    @property
    def hosts_per_block(self) -> int:
        """Block size of the median host, if the job takes the largest blocks. No tp group inside
        blocks is larger (`blocks_hold`)."""
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
    """Whether blocks of these sizes hold `hosts` in groups of `wide`, each inside one block."""
    return sum(size // wide for size in blocks) * wide >= hosts
