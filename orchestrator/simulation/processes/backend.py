"""Backends of simulated agents and leaders. The simulated scheduler or operator answers.

The calls are coroutines, which the worker of a simulated process awaits. An answer takes virtual
time, and the process may die before it arrives.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, cast

from orchestrator.contract.launch import Allocation, Cause, LaunchPlan
from orchestrator.seams import (
    AllocationBackend,
    CurrentRun,
    FixedHosts,
    GrantingScheduler,
    HostNotice,
    SuccessorHosts,
    UnattendedAllocation,
)
from orchestrator.simulation.world.k8s_operator import KubernetesOperator
from orchestrator.simulation.world.scheduler import Scheduler

if TYPE_CHECKING:
    from orchestrator.simulation.processes.agent_process import AgentProcess

ANSWER_S = 0.5
"""Seconds until a scheduler answers."""
CLEAR_S = 2.0
"""Seconds of a Slurm step on another host."""


class LocalBackend:
    """A machine without a scheduler."""

    granted: GrantingScheduler | None = None
    successors: SuccessorHosts | None = None
    unattended: UnattendedAllocation | None = None

    def __init__(self, process: "AgentProcess") -> None:
        self.process = process
        self.host = process.host.name
        self.fixed_hosts: FixedHosts | None = cast(FixedHosts, self)

    def cluster(self) -> str:
        return "simulated"

    async def replace(
        self,
        launch: LaunchPlan,
        host: str,
        *,
        elsewhere: bool = False,
        shut: bool = False,
        silent_s: float = 0.0,
    ) -> None:
        await asyncio.sleep(ANSWER_S)
        self.process.world.restart_local_agent(self.process, host)

    async def rival(self, launch: LaunchPlan) -> str | None:
        return None

    async def unbegun(self, launch: LaunchPlan, hosts: Sequence[str]) -> Mapping[str, str]:
        """Always empty, because every simulated host can start an agent."""
        return {}

    async def clear_host(self, launch: LaunchPlan, host: str) -> str:
        world = self.process.world
        world.laws.check_takeover(self.process, world.storage.fold())
        await asyncio.sleep(CLEAR_S)
        return self._cleared(host)

    def _cleared(self, host: str) -> str:
        return self.process.world.clear_local_host(host)


class SlurmBackend(LocalBackend):
    def __init__(self, process: "AgentProcess", scheduler: Scheduler) -> None:
        super().__init__(process)
        self.scheduler = scheduler
        self.granted = cast(GrantingScheduler, self)
        self.unattended = cast(UnattendedAllocation, self)

    async def replace(
        self,
        launch: LaunchPlan,
        host: str,
        *,
        elsewhere: bool = False,
        shut: bool = False,
        silent_s: float = 0.0,
    ) -> None:
        await asyncio.sleep(ANSWER_S)
        self.scheduler.replace(self.process, host, elsewhere=elsewhere)

    async def allocation(self, launch: LaunchPlan) -> Allocation:
        await asyncio.sleep(ANSWER_S)
        return self.scheduler.allocation(self.process)

    async def notices(self, launch: LaunchPlan, hosts: Sequence[str]) -> tuple[HostNotice, ...]:
        await asyncio.sleep(ANSWER_S)
        return self.scheduler.notices(self.host, hosts)

    async def own_run(self, launch: LaunchPlan, hosts: Sequence[str]) -> CurrentRun:
        await asyncio.sleep(ANSWER_S)
        return self.scheduler.own_run(self.process)

    async def why_ending(self, launch: LaunchPlan) -> Cause:
        await asyncio.sleep(ANSWER_S)
        return self.scheduler.why_ending(self.process)

    async def standing(self, launch: LaunchPlan) -> str | None:
        await asyncio.sleep(ANSWER_S)
        return self.scheduler.standing(self.host)

    async def requeue(
        self,
        launch: LaunchPlan,
        exclude: Sequence[str],
        *,
        again: Sequence[str] = (),
        whole: bool = True,
    ) -> None:
        await asyncio.sleep(ANSWER_S)
        await self.scheduler.requeue(self.process, exclude, again=again, whole=whole)

    def _cleared(self, host: str) -> str:
        return self.scheduler.clear_host(self.process, host)

    async def release(self, launch: LaunchPlan) -> None:
        """Nothing to do: a simulated run ends with the last of its agents."""


class KubernetesBackend(LocalBackend):
    def __init__(self, process: "AgentProcess", operator: KubernetesOperator) -> None:
        super().__init__(process)
        self.operator = operator
        self.fixed_hosts = None
        self.granted = cast(GrantingScheduler, self)
        self.successors = cast(SuccessorHosts, self)

    async def replace(
        self,
        launch: LaunchPlan,
        host: str,
        *,
        elsewhere: bool = False,
        shut: bool = False,
        silent_s: float = 0.0,
    ) -> None:
        await asyncio.sleep(ANSWER_S)
        self.operator.replace(self.process, host, elsewhere=elsewhere, shut=shut, silent_s=silent_s)

    async def allocation(self, launch: LaunchPlan) -> Allocation:
        await asyncio.sleep(ANSWER_S)
        return self.operator.allocation(self.process)

    async def notices(self, launch: LaunchPlan, hosts: Sequence[str]) -> tuple[HostNotice, ...]:
        await asyncio.sleep(ANSWER_S)
        return self.operator.notices(self.host, hosts)

    async def own_run(self, launch: LaunchPlan, hosts: Sequence[str]) -> CurrentRun:
        """Pods end one by one, so only the API server itself is checked."""
        await self.notices(launch, ())
        return CurrentRun(phase="running", words="Kubernetes answers", hosts=tuple(hosts))

    async def why_ending(self, launch: LaunchPlan) -> Cause:
        await asyncio.sleep(ANSWER_S)
        return self.operator.why_ending(self.process)

    async def standing(self, launch: LaunchPlan) -> str | None:
        await asyncio.sleep(ANSWER_S)
        return self.operator.standing(self.host)

    async def requeue(
        self,
        launch: LaunchPlan,
        exclude: Sequence[str],
        *,
        again: Sequence[str] = (),
        whole: bool = True,
    ) -> None:
        await asyncio.sleep(ANSWER_S)
        self.operator.requeue(self.process, exclude, again=again, whole=whole)

    async def taken(self, launch: LaunchPlan, hosts: Mapping[str, float]) -> Mapping[str, str]:
        await asyncio.sleep(ANSWER_S)
        return self.operator.taken(self.host, hosts)

    async def revive_leader(self, launch: LaunchPlan, *, silent_s: float | None) -> None:
        await asyncio.sleep(ANSWER_S)
        self.operator.revive_leader(self.process, silent_s)


def backend_of(process: "AgentProcess") -> AllocationBackend:
    scheduler = process.world.scheduler
    found: LocalBackend
    if not process.world.scenario.scheduled:
        found = LocalBackend(process)
    elif isinstance(scheduler, KubernetesOperator):
        found = KubernetesBackend(process, scheduler)
    else:
        found = SlurmBackend(process, scheduler)
    return cast(AllocationBackend, found)
