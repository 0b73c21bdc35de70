"""What a backend is asked to start: one agent on each host; and what a scheduler gave for it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from orchestrator.contract.spec.kubernetes_spec import KubernetesSpec
from orchestrator.contract.spec.slurm_spec import SlurmSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPlan:
    job: str
    run_dir: str
    """Absolute, on a file system that every host sees."""
    launch: int
    """Number of this submission of the job, from 1; fences off agents of an earlier one."""
    hosts: tuple[str, ...]
    """The hosts asked for, spares last; of a scheduler, which chooses, only their number counts."""
    devices_per_host: int
    agent_timeout: float
    slurm: SlurmSpec | None = None
    kubernetes: KubernetesSpec | None = None
    """Each for the backend of that name."""
    exclude: tuple[str, ...] = ()
    """Hosts that a scheduler is asked not to give."""

    @property
    def leader(self) -> str:
        """The host whose agent carries the supervisor."""
        return self.hosts[0]


Cause = Literal["cancelled", "preempted", "time-limit", "requeued", "drained", "failed", "unknown"]
"""Why a scheduler ends, or is about to end, an allocation. `failed`: what it started there for the
job has broken, as the batch script of a Slurm job that was killed; nobody wants the hosts back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakdown:
    """Something that a scheduler ran for a job and that all agents depended on broke, as srun that
    was killed: no host is to blame."""

    what: str
    """In words, as `SIGKILL ended srun on node3, and with it all agents`."""
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """What a scheduler granted, as the leader finds it when it starts."""

    id: str
    """The scheduler's name of the job."""
    restarts: int
    """How often the scheduler has started it again."""
    hosts: tuple[str, ...]
    switches: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Host to its switches from the outermost down, where the scheduler knows them."""
    ends_at: float | None = None
    """Unix seconds of the time limit."""
    notice_s: float | None = None
    """How long before its end the scheduler says so; None where nobody can tell."""
    successor_s: float | None = None
    """Where the scheduler itself puts another host, of whatever name, in the place of one that is
    lost: how long that may take, while those that are left wait in place; `hosts` are then those
    of the moment. None: there are no others than `hosts`."""
    broke_before: Breakdown | None = None
    """What ended the run of the job before this one, where that is known to be no agent's end."""
    names_resolve: bool = True
    """Hosts reach each other by these names, too; not where they are merely what a scheduler calls
    the machines below them."""
