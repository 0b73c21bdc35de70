"""Calls the real planner for a simulated leader."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from orchestrator.contract.plan import Plan
from orchestrator.errors import PlanError
from orchestrator.job.plans import JobPlan, Refit, Shortage
from orchestrator.leader.backend_calls import Planners
from orchestrator.simulation.world.jobs import plan_for

if TYPE_CHECKING:
    from orchestrator.simulation.world.world import World


def planners_of(world: "World") -> Planners:
    each, least = world.scenario.ranks_per_host, world.scenario.min_hosts

    def fewer(
        former: Plan, hosts: Sequence[str], switches: Mapping[str, tuple[str, ...]]
    ) -> JobPlan:
        found = smaller_plan(len(hosts), least, each)
        return JobPlan(plan=found, number=world.add_plan(found))

    def less(
        former: Plan,
        hosts: Sequence[str],
        switches: Mapping[str, tuple[str, ...]],
        short: Shortage,
    ) -> Refit:
        """Try a new plan only, no other way to save memory."""
        if not short.adopt:
            return Refit(found=None, why="on_oom is stop")
        try:
            found = plan_for(len(former.hosts), each, short.device_bytes)
        except PlanError as exc:
            return Refit(found=None, why=exc.message)
        return Refit(found=JobPlan(plan=found, number=world.add_plan(found)), why="refitted")

    return Planners(fewer=fewer, less=less)


@lru_cache(maxsize=256)
def smaller_plan(hosts: int, min_hosts: int, each: int) -> Plan:
    """A plan for the largest possible number of hosts, like `app/planning/replan.py`. Raises
    PlanError."""
    first: PlanError | None = None
    for count in range(hosts, min_hosts - 1, -1):
        try:
            return plan_for(count, each)
        except PlanError as exc:
            first = first or exc
    raise first or PlanError(f"{hosts} hosts are fewer than resilience.min_hosts")
