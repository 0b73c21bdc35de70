"""What a backend is asked to start: one agent on each host."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPlan:
    job: str
    run_dir: str
    """Absolute, on a file system that every host sees."""
    launch: int
    """Number of this submission of the job, from 1; fences off agents of an earlier one."""
    hosts: tuple[str, ...]
    """The hosts asked for, spares last."""
    devices_per_host: int
    agent_timeout: float
    """Seconds without a word after which agent and leader give each other up."""

    @property
    def leader(self) -> str:
        """The host whose agent carries the supervisor."""
        return self.hosts[0]
