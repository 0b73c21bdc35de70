"""The input of a forecast: failures, saves and hosts of a job."""

from msgspec import Struct

PARTS = ("training", "detection", "restart", "lost work", "checkpoint stalls", "queue")
"""Where the time of a job goes."""


class Hazard(Struct, frozen=True, kw_only=True):
    """One kind of failure, with its rate for the whole job."""

    name: str
    per_s: float
    detection_s: float
    """Time from the failure until ndctl detects it."""
    takes_host: bool
    planned: bool = False
    """Announced, so that a checkpoint is written first and no work is lost."""
    covered: bool = False
    """Ranks resume from the memory of hosts, and the disk is not read."""


class MemoryTier(Struct, frozen=True, kw_only=True):
    """Checkpoints in the memory of hosts."""

    interval_s: float
    """Training between the end of one copy's stall and the next copy."""
    stall_s: float
    """Time that a copy stalls training."""
    lag_s: float
    """From the start of a copy until the hosts that would restore it have it."""
    restart_s: float
    """From the detection of a failure to the next step, with nothing read from the disk."""

    @property
    def share(self) -> float:
        """Of the time, that copies stall training."""
        return self.stall_s / (self.interval_s + self.stall_s)


class Setting(Struct, frozen=True, kw_only=True):
    hosts: int
    """Hosts that the job trains on."""
    spares: int
    """Spare hosts that the job holds."""
    reserve: int
    """Further hosts that the scheduler can grant."""
    horizon_s: float
    hazards: tuple[Hazard, ...]
    interval_s: float
    """Training between the end of one save's stall and the next save."""
    stall_s: float
    """Time that a save stalls training."""
    write_s: float
    """From the start of a save until it is complete and usable."""
    restart_s: float
    """From the detection of a failure to the next step, if enough hosts are free."""
    repair_s: float
    """Mean repair time of a failed host."""
    queue_s: float
    """Mean time until the scheduler grants a host."""
    memory: MemoryTier | None = None
    """None: checkpoints are on the disk only, and no hazard is covered."""

    @property
    def stalled_s(self) -> float:
        """Stall per save. It is longer if the previous save is still being written."""
        return max(self.stall_s, self.write_s - self.interval_s)

    @property
    def unplanned(self) -> tuple[Hazard, ...]:
        return tuple(hazard for hazard in self.hazards if not hazard.planned)

    @property
    def mtbf_s(self) -> float:
        """Mean time between unplanned failures of the job."""
        return 1 / sum(hazard.per_s for hazard in self.unplanned)

    @property
    def leaving_per_s(self) -> float:
        """Hosts that leave for repair per second."""
        return sum(hazard.per_s for hazard in self.hazards if hazard.takes_host)
