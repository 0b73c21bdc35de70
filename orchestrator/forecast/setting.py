"""What a forecast is reckoned from: a job as far as its failures and saves are concerned."""

from dataclasses import dataclass

PARTS = ("training", "detection", "restart", "lost work", "checkpoint stalls", "queue")
"""Where a job's time goes; the first is what it is there for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hazard:
    """One kind of failure, as it befalls the whole job."""

    name: str
    per_s: float
    detection_s: float
    """From the failure until ndctl knows of it."""
    takes_host: bool
    planned: bool = False
    """Known before: a checkpoint is written first, and nothing is lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    hosts: int
    """That the job trains on."""
    spares: int
    """That it holds beside them."""
    reserve: int
    """Further ones that a scheduler can give."""
    horizon_s: float
    hazards: tuple[Hazard, ...]
    interval_s: float
    """Training between the end of one save's stall and the next save."""
    stall_s: float
    """What training stands still for a save."""
    write_s: float
    """From the beginning of a save until it is complete; a failure before that has no use of it."""
    restart_s: float
    """From knowing of a failure to the next step, where the hosts are there."""
    repair_s: float
    """Mean time for which a host that broke is gone."""
    queue_s: float
    """Mean time to get a host of the reserve."""

    @property
    def stalled_s(self) -> float:
        """For a save, where the one before may still be being written."""
        return max(self.stall_s, self.write_s - self.interval_s)

    @property
    def unplanned(self) -> tuple[Hazard, ...]:
        return tuple(hazard for hazard in self.hazards if not hazard.planned)

    @property
    def mtbf_s(self) -> float:
        """Of the job, between failures that nobody planned."""
        return 1 / sum(hazard.per_s for hazard in self.unplanned)

    @property
    def leaving_per_s(self) -> float:
        """How often a host leaves."""
        return sum(hazard.per_s for hazard in self.hazards if hazard.takes_host)
