"""Actions that `step` decides: commands that are idempotent per attempt, each with its reason."""

from typing import Literal

from msgspec import Struct

from orchestrator.contract.drills import Drill
from orchestrator.contract.files.checkpoint_names import Made
from orchestrator.contract.skipped_batches import Window

Ending = Literal["SUCCEEDED", "FAILED", "CANCELLED"]


class StartAttempt(Struct, frozen=True, kw_only=True):
    attempt: int
    hosts: tuple[str, ...]
    """In node-rank order."""
    plan: int
    """Number of the plan that the ranks follow."""
    drills: tuple[Drill, ...]
    reason: str
    skip: tuple[Window, ...] = ()
    """Windows of data that are skipped on purpose."""
    lineage: int = 0
    """As in `HostMemory`."""
    resumed: tuple[Made, ...] = ()
    """As in `is_history` (`memory/slot_file.py`)."""
    crossing: tuple[int, ...] = ()
    """Placement cost of these hosts: bytes per step that leave a host, a leaf, a spine, and so on.
    """


class StopAttempt(Struct, frozen=True, kw_only=True):
    """Send SIGTERM to every rank, and SIGKILL after the grace period."""

    attempt: int
    grace_s: float
    reason: str
    hosts: tuple[str, ...] = ()
    """Hosts on which an ended attempt may have left ranks; empty: the hosts of the current one."""
    keep_ranks: bool = False
    """In place of SIGTERM, order the ranks to leave the attempt and wait for the next one."""
    in_memory: bool = False
    """The next attempt starts on hosts that have the memory of this one. The ranks need not write
    the disk if the step that they stop after is on all partner hosts."""


class SaveCheckpoint(Struct, frozen=True, kw_only=True):
    """Have the ranks save a checkpoint to the disk after the present step, and go on."""

    attempt: int
    reason: str


class GatherEvidence(Struct, frozen=True, kw_only=True):
    attempt: int
    timeout_s: float
    reason: str
    ended: bool = False
    """The attempt is over: collect what its ranks wrote when they ended."""


class JudgeHang(Struct, frozen=True, kw_only=True):
    """Analyse the evidence received so far while the ranks are being stopped."""

    attempt: int
    reason: str


class ReplaceAgent(Struct, frozen=True, kw_only=True):
    """Ask the backend for a new agent for a host whose agent is gone."""

    host: str
    reason: str
    elsewhere: bool = False
    """On any other host. The bad host's own agent may still be alive."""
    shut: bool = False
    """The scheduler itself keeps jobs off the bad host, for a time that it decides."""


class EndJob(Struct, frozen=True, kw_only=True):
    """Every agent exits, and the allocation is given back."""

    state: Ending
    reason: str


class CheckHosts(Struct, frozen=True, kw_only=True):
    """Check the hosts together with one small all-reduce."""

    check: int
    hosts: tuple[str, ...]
    timeout_s: float
    reason: str


class Replan(Struct, frozen=True, kw_only=True):
    """Search a plan for fewer hosts, or for less memory, at the same global batch."""

    hosts: int
    reason: str
    device_bytes: int | None = None
    """Measured memory of a device, after the current plan did not fit; None: as in the profile."""
    adopt: bool = True
    """The job continues with the new plan. False: only the alternatives are needed."""


class Requeue(Struct, frozen=True, kw_only=True):
    """Every agent exits, and the scheduler is asked for other hosts."""

    exclude: tuple[str, ...]
    reason: str
    whole: bool = True
    """Give back all hosts. False: only the leader's host; the others wait for the next leader."""
    again: tuple[str, ...] = ()
    """Hosts that were excluded before and that the scheduler may grant again."""


Action = (
    StartAttempt
    | StopAttempt
    | SaveCheckpoint
    | GatherEvidence
    | JudgeHang
    | ReplaceAgent
    | CheckHosts
    | Replan
    | Requeue
    | EndJob
)
