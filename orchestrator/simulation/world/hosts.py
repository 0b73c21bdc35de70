"""A host: up or not, with its clock, its agents and what runs on it."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from orchestrator.contract.check_results import Finding
from orchestrator.simulation.clock import HostClock

if TYPE_CHECKING:
    from orchestrator.simulation.processes.agent_process import AgentProcess
    from orchestrator.simulation.world.ranks import HostRanks

BROKEN = Finding(what="devices", verdict="stops", found="a device does not answer")


@dataclass(slots=True, eq=False)
class Host:
    name: str
    clock: HostClock
    up: bool = True
    dead_on_arrival: bool = False
    """Its agent never comes."""
    stuck: bool = False
    """The kernel cannot end its ranks."""
    findings: tuple[Finding, ...] = ()
    slow_s: float = 0.0
    """What its ranks take longer for their own part of a step."""
    slow_until: float = 0.0
    stood: bool = False
    """Its ranks have stood still by themselves at some time …"""
    lagged: bool = False
    """… or were slower than others."""
    draining: str = ""
    """Why an administrator wants it back …"""
    drained_at: float = 0.0
    """… and since when."""
    down_since: float | None = None
    """Since when the scheduler does not hear it."""
    agents: list["AgentProcess"] = field(default_factory=list)
    ranks: list["HostRanks"] = field(default_factory=list)
    """Physically there, whoever knows of them."""

    @property
    def agent(self) -> "AgentProcess | None":
        """The one that lives and holds the host."""
        return next((agent for agent in self.agents if agent.alive and agent.holds), None)

    def power_off(self) -> None:
        """All that ran here is gone, without a word to anybody."""
        self.up = False
        for ranks in list(self.ranks):
            ranks.vanish()
        self.end_agents(silently=True)

    def end_agents(self, *, silently: bool = False) -> None:
        for agent in [agent for agent in self.agents if agent.alive]:
            agent.die(silently=silently)
        self.agents.clear()
