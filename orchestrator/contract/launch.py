"""What a backend must start (one agent on each host), and what the scheduler granted for it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from msgspec import Struct, field

from orchestrator.contract.files.run_dir import RunDir
from orchestrator.contract.spec.kubernetes_spec import KubernetesSpec
from orchestrator.contract.spec.run_spec import Capture
from orchestrator.contract.spec.slurm_spec import SlurmSpec


class LaunchPlan(Struct, frozen=True, kw_only=True):
    job: str
    run_dir: str
    """Absolute path on a file system that every host sees."""
    launch: int
    """Number of this submission of the job, from 1. Agents of an earlier one are rejected."""
    hosts: tuple[str, ...]
    """The requested hosts, spares last. A scheduler chooses hosts itself, so only their number
    counts then."""
    devices_per_host: int
    agent_timeout: float
    slurm: SlurmSpec | None = None
    kubernetes: KubernetesSpec | None = None
    """`slurm` and `kubernetes` are for the backend of that name."""
    exclude: tuple[str, ...] = ()
    """Hosts that the scheduler must not grant."""
    capture: str = ""
    """The folder of the user's program, which is copied to the run directory. Empty: no copy."""

    after: tuple[str, ...] = ()
    """Run directories of jobs that must have succeeded before the agents start. Slurm has a
    dependency too."""

    @property
    def slurm_spec(self) -> SlurmSpec:
        """`slurm`, or the defaults."""
        return self.slurm or SlurmSpec()

    @property
    def kubernetes_spec(self) -> KubernetesSpec:
        """`kubernetes`, or the defaults."""
        return self.kubernetes or KubernetesSpec()

    @property
    def captured(self) -> Capture | None:
        """The copy of the user's program; None: there is none."""
        if not self.capture:
            return None
        copy = RunDir(Path(self.run_dir)).capture(self.launch)
        return Capture(folder=self.capture, copy=str(copy))

    @property
    def leader(self) -> str:
        """The host whose agent runs the leader."""
        return self.hosts[0]


Cause = Literal["cancelled", "preempted", "time-limit", "requeued", "drained", "failed", "unknown"]
"""Why a scheduler ends an allocation or is about to end it. `failed`: something that the scheduler
ran for the job broke, such as the batch script of a Slurm job; the hosts are not claimed back."""


class Breakdown(Struct, frozen=True, kw_only=True):
    """Something that all agents depend on broke, such as srun; no host is the culprit."""

    what: str
    """For example `SIGKILL ended srun on node3, and with it all agents`."""
    at: float


class Allocation(Struct, frozen=True, kw_only=True):
    """What a scheduler granted, as the leader finds it at its start."""

    id: str
    """The job's name in the scheduler."""
    restarts: int
    """How often the scheduler has restarted the job."""
    hosts: tuple[str, ...]
    switches: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Host -> its switches, outermost first; empty if the scheduler does not know them."""
    ends_at: float | None = None
    """Time limit in Unix seconds."""
    notice_s: float | None = None
    """Seconds before the end at which the scheduler sends its signal; None if unknown."""
    successor_s: float | None = None
    """Seconds that the scheduler may need to put another host in the place of a lost one, while
    the remaining hosts wait. `hosts` is then only the current set, and host names may change.
    None: the scheduler does not replace hosts, so there are no others than `hosts`."""
    broke_before: Breakdown | None = None
    """What ended the previous run of the job, if it was not the end of an agent."""
    names_resolve: bool = True
    """Whether hosts reach each other by these names. False if the names are only the scheduler's
    labels of machines."""
