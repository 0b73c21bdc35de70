"""The hardware as the cost model sees it: achievable rates instead of nominal ones."""

from msgspec import Struct, field
from msgspec.structs import replace

from orchestrator.inventory.calibration import AttentionKernel, Calibration
from orchestrator.inventory.profile import Fabric, Profile
from orchestrator.plan.cost.collectives import Wire
from orchestrator.plan.cost.groups import group

DEEP = 8192
"""Inner size of the matrix products for which the calibration gives the rate."""
SAME_DEVICE = 0.02
"""If the sustained rate of a device differs more than this from the calibrated device, its numbers
count as derived, not measured."""
LEAST_TAKEN = 0.25
"""Smallest share of the processors that a collective takes, relative to one at full rate inside a
host: NCCL uses at least two channels per link."""


class Machine(Struct, frozen=True, eq=False):
    """Compared by identity, because it is a key of caches (`lru_cache`)."""

    fabric: Fabric
    calibration: Calibration
    rates: dict[str, float]
    """Operations per second of an infinitely large matrix product, by type."""
    kernel: AttentionKernel
    attention: dict[str, tuple[float, float]]
    """Operations per second of the attention kernel on long sequences, forward and backward, by
    type."""
    memory_bytes_per_s: float
    fastest_tile: float
    """Speed of the fastest tile of a matrix product, relative to the first kind of tile."""
    has_device: bool
    """A host starts the operations of a separate device (a GPU)."""
    wires: dict[tuple[int, int], Wire] = field(default_factory=dict)

    def wire(self, size: int, stride: int) -> Wire:
        """The links between `size` ranks that are `stride` ranks apart."""
        found = self.wires.get((size, stride))
        if found is None:
            found = self.wires[size, stride] = _wire(self.fabric, self.calibration, size, stride)
        return found


_MACHINES: dict[int, Machine] = {}
_MOST = 64


def machine_of(fabric: Fabric) -> Machine:
    """The machine of `fabric`, cached, because a search asks for it once per split."""
    # Keyed by id, because a profile has mappings and so no hash. The machine keeps the fabric
    # alive, so its id cannot be reused.
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
    kernel = calibration.kernels[calibration.attention]
    if calibration.certainty == "measured" and abs(slowed - 1) > SAME_DEVICE:
        calibration = replace(calibration, certainty="derived")
    # Attention draws less power than matrix products, so the clock drops only half as much. On B200
    # cuDNN has 0.84 of the rate at 128k tokens, when the chip is hot, that it has at 32k.
    clock = (1 + slowed * calibration.steady) / 2
    boundless = slowed * (DEEP + calibration.depth_half) / DEEP
    rates = {
        kind: rate
        * calibration.gemm.get(kind, calibration.gemm["bfloat16"])
        * boundless
        * _steady(calibration, kind)
        for kind, rate in profile.flops.items()
    }
    rates.setdefault("float8", rates["bfloat16"])
    return Machine(
        fabric=fabric,
        calibration=calibration,
        rates=rates,
        kernel=kernel,
        attention={
            kind: (peak * kernel.forward * clock, peak * kernel.backward * clock)
            for kind, peak in _attention_peaks(profile).items()
        },
        memory_bytes_per_s=profile.memory_bytes_per_s * calibration.memory,
        fastest_tile=max(tile.speed for tile in calibration.tiles),
        has_device=profile.device != "cpu",
    )


def _attention_peaks(profile: Profile) -> dict[str, float]:
    """The peaks of which the calibration gives attention's shares, by type."""
    half = profile.flops["bfloat16"]
    # The calibration of a CPU takes its shares from this one peak in any type.
    if profile.device == "cpu":
        return {"bfloat16": half, "float32": half}
    # FlashAttention and cuDNN have no float32 kernel. Assumption: the memory-efficient kernel that
    # torch takes instead reaches the same share of the lower peak.
    return {"bfloat16": half, "float32": profile.flops["float32"]}


def _steady(calibration: Calibration, kind: str) -> float:
    if kind == "float8" and calibration.steady_float8 is not None:
        return calibration.steady_float8
    return calibration.steady


def _slowed(profile: Profile) -> float:
    """Sustained rate of this device relative to the calibrated device."""
    if profile.sustained is None:
        return 1.0
    return profile.sustained / profile.calibration.gemm["bfloat16"]


def _wire(fabric: Fabric, calibration: Calibration, size: int, stride: int) -> Wire:
    profile, ranks = fabric.profile, group(size, stride, fabric)
    near, far = profile.intra_host, profile.inter_host
    if ranks.hosts > ranks.blocks:
        # NCCL joins the topologies of hosts that NVLink connects (MNNVL, since 2.21). Assumption:
        # its rings treat a block like a host.
        near = fabric.block_link
    near_how, far_how = calibration.links[near.kind], calibration.links[far.kind]
    near_rate, far_rate = near.bytes_per_s * near_how.share, far.bytes_per_s * far_how.share
    if ranks.blocks == 1:
        bus, pair, how = near_rate, near_rate, near_how
    else:
        # Rings leave a host or a block over the links of all ranks of the group in it.
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
        # A collective over slower links occupies fewer processors.
        contention=calibration.contention * max(LEAST_TAKEN, min(1.0, bus / near_rate)),
    )
