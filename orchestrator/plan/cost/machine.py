"""A fabric as the model reckons with it: rates that are reached instead of nominal ones."""

from dataclasses import dataclass, field, replace

from orchestrator.inventory.calibration import Calibration
from orchestrator.inventory.profile import Fabric, Profile
from orchestrator.plan.cost.collectives import Wire
from orchestrator.plan.cost.groups import group

DEEP = 8192
"""Inner size of the products whose rate the calibration gives: the best ones have about that."""
ALIKE = 0.02
"""Difference of what a device sustains to what was calibrated, above which the rest is no longer
called measured."""
LEAST_TAKEN = 0.25
"""Of the processors that a collective at the full rate inside a host takes: NCCL has two channels
or more for each link."""


@dataclass(frozen=True, slots=True, eq=False)
class Machine:
    """Compared by identity: a cache of layers' times belongs to it."""

    fabric: Fabric
    calibration: Calibration
    rates: dict[str, float]
    """Operations a second of a boundless matrix product, by type."""
    attention: tuple[float, float]
    """Of the attention kernel forward and backward, on long sequences."""
    memory_bytes_per_s: float
    quickest_tile: float
    """Of a matrix product, against the first kind of tiles."""
    host_apart: bool
    """The host that starts operations is not the device that does them."""
    wires: dict[tuple[int, int], Wire] = field(default_factory=dict)

    def wire(self, size: int, stride: int) -> Wire:
        """Between `size` ranks, each `stride` from the next."""
        found = self.wires.get((size, stride))
        if found is None:
            found = self.wires[size, stride] = _wire(self.fabric, self.calibration, size, stride)
        return found


_MACHINES: dict[int, Machine] = {}
_MOST = 64


def machine_of(fabric: Fabric) -> Machine:
    """The same machine for the same fabric: a search asks for it for each split."""
    # By identity, for a profile holds mappings; the machine keeps the fabric alive, so that no
    # other can have its id.
    found = _MACHINES.get(id(fabric))
    if found is None:
        if len(_MACHINES) >= _MOST:
            _MACHINES.clear()
        found = _MACHINES[id(fabric)] = _machine(fabric)
    return found


def _machine(fabric: Fabric) -> Machine:
    profile = fabric.profile
    calibration = profile.calibration
    slowed = _slowed(profile)
    peak = profile.flops["bfloat16"]
    attention = (calibration.attention_forward, calibration.attention_backward)
    if calibration.certainty == "measured" and abs(slowed - 1) > ALIKE:
        calibration = replace(calibration, certainty="derived")
    boundless = calibration.steady * (DEEP + calibration.depth_half) / DEEP
    rates = {
        kind: rate * calibration.gemm.get(kind, calibration.gemm["bfloat16"]) * slowed * boundless
        for kind, rate in profile.flops.items()
    }
    rates.setdefault("float8", rates["bfloat16"])
    return Machine(
        fabric=fabric,
        calibration=calibration,
        rates=rates,
        # Attention draws less power than matrix products do: half as far from the peak's clock.
        attention=(peak * attention[0] * (1 + slowed) / 2, peak * attention[1] * (1 + slowed) / 2),
        memory_bytes_per_s=profile.memory_bytes_per_s * calibration.memory,
        quickest_tile=max(tile.speed for tile in calibration.tiles),
        host_apart=profile.device != "cpu",
    )


def _slowed(profile: Profile) -> float:
    """What the profile says its device sustains, against the one that was calibrated."""
    if profile.sustained is None:
        return 1.0
    return profile.sustained / profile.calibration.gemm["bfloat16"]


def _wire(fabric: Fabric, calibration: Calibration, size: int, stride: int) -> Wire:
    profile, ranks = fabric.profile, group(size, stride, fabric)
    near, far = profile.intra_host, profile.inter_host
    if ranks.hosts > ranks.blocks:
        # NCCL joins the topologies of hosts that NVLink connects (MNNVL, since 2.21); that its
        # rings then run in a block and leave it as they do with a host is assumed.
        near = fabric.block_link
    near_how, far_how = calibration.links[near.kind], calibration.links[far.kind]
    near_rate, far_rate = near.bytes_per_s * near_how.share, far.bytes_per_s * far_how.share
    if ranks.blocks == 1:
        bus, pair, how = near_rate, near_rate, near_how
    else:
        # Rings leave a host, or a block, over the links of all of the group's ranks in it.
        bus = far_rate * ranks.per_block
        bus = min(bus, near_rate) if ranks.per_block > 1 else bus
        pair, how = far_rate, far_how
    return Wire(
        group=ranks,
        bus_bytes_per_s=bus,
        pair_bytes_per_s=pair,
        near_bytes_per_s=near_rate,
        half_bytes=how.half_bytes,
        base_s=how.base_s,
        hop_s=near.latency_s,
        far_hop_s=far.latency_s,
        # A collective that waits for slower links takes fewer processors.
        contention=calibration.contention * max(LEAST_TAKEN, min(1.0, bus / near_rate)),
    )
