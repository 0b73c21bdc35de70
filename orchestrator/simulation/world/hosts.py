"""A simulated host with its clock, agents and ranks."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from orchestrator.contract.check_results import Finding
from orchestrator.simulation.clock import HostClock

if TYPE_CHECKING:
    from orchestrator.simulation.processes.agent_process import AgentProcess
    from orchestrator.simulation.world.ranks import HostRanks

FAILED_CHECK = Finding(what="devices", verdict="stops", found="a device does not answer")


@dataclass(slots=True, eq=False)
class Host:
    name: str
    clock: HostClock
    up: bool = True
    boots: int = 1
    agent_never_starts: bool = False
    """Its agent never starts."""
    unkillable: bool = False
    """The kernel cannot end its ranks."""
    findings: tuple[Finding, ...] = ()
    slow_s: float = 0.0
    """Additional seconds that its ranks take for their own part of a step."""
    slow_until: float = 0.0
    ever_hung: bool = False
    """Its ranks hung at some time."""
    ever_slow: bool = False
    """Its ranks were slower than others at some time."""
    own_warnings: set[str] = field(default_factory=set)
    """Problems that it alone has warned of."""
    draining: str = ""
    """The administrator's reason for the drain; empty: not drained."""
    drained_at: float = 0.0
    down_since: float | None = None
    """When the scheduler marked it as down."""
    agents: list["AgentProcess"] = field(default_factory=list)
    ranks: list["HostRanks"] = field(default_factory=list)
    """The ranks that really run here, also those that no agent knows."""

    @property
    def boot(self) -> str:
        """The id of its last boot."""
        return f"{self.name}/{self.boots}"

    @property
    def agent(self) -> "AgentProcess | None":
        """The live agent that holds the lock of the host."""
        return next((agent for agent in self.agents if agent.alive and agent.holds_lock), None)

    def power_off(self) -> None:
        """End all processes without any message."""
        self.up = False
        self.boots += 1
        for ranks in list(self.ranks):
            ranks.power_lost()
        self.end_agents(silently=True)

    def end_agents(self, *, silently: bool = False) -> None:
        for agent in [agent for agent in self.agents if agent.alive]:
            agent.die(silently=silently)
        self.agents.clear()
