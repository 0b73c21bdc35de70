"""What a job asks of the topology, so that Slurm grants hosts as near to each other as the plan's.

A request cannot name hosts: the plan's may be taken by the time the job starts. It says how many
leaf switches, or how many hosts of a block together, and which hosts would not do.
"""

import math
from collections import Counter
from dataclasses import dataclass, replace

from orchestrator.contract.plan import Plan
from orchestrator.contract.spec.slurm_spec import SlurmSpec
from orchestrator.inventory.hosts import Inventory
from orchestrator.inventory.slurm.hostlist import expand, fold
from orchestrator.inventory.slurm.topology import Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class TopologyRequest:
    switches: int | None = None
    """Leaf switches at most; Slurm waits for that (`max_switch_wait`), and then takes others."""
    segment: int | None = None
    """Hosts that have to be in one block."""
    exclude: tuple[str, ...] = ()


def request_of(
    plan: Plan, inventory: Inventory, topology: Topology, spares: int
) -> TopologyRequest:
    """For the hosts of `plan` and as many `spares`."""
    total = len(plan.hosts) + spares
    return TopologyRequest(
        switches=_switches(plan, inventory, topology, total) if topology.kind == "tree" else None,
        segment=_segment(plan, topology, total) if topology.kind == "block" else None,
        exclude=(*sorted(_of_another_kind(plan, inventory)),),
    )


def _switches(plan: Plan, inventory: Inventory, topology: Topology, total: int) -> int | None:
    """Those above the plan's hosts, and of the fullest others as many as the spares need; None
    where any hosts would fit, or where the switch of one is not known."""
    able = [host.name for host in inventory.with_devices(plan.ranks_per_host)]
    if not all(topology.switches.get(host) for host in (*plan.hosts, *able)):
        return None
    room = Counter(topology.switches[host] for host in able)
    used = {topology.switches[host] for host in plan.hosts}
    left = total - sum(room[leaf] for leaf in used)
    count = len(used)
    for _, hosts in Counter(
        {leaf: n for leaf, n in room.items() if leaf not in used}
    ).most_common():
        if left <= 0:
            break
        left, count = left - hosts, count + 1
    leaves = {
        topology.switches[host.name] for host in inventory.hosts if host.name in topology.switches
    }
    return count if count < len(leaves) else None


def _segment(plan: Plan, topology: Topology, total: int) -> int | None:
    """The most hosts that every block of the plan has a multiple of; the spares have to fit in,
    for Slurm takes only a segment that divides the number of hosts."""
    if not all(host in topology.blocks for host in plan.hosts):
        return None
    sizes = Counter(topology.blocks[host] for host in plan.hosts)
    if len(sizes) == 1:
        (block,) = sizes
        whole = sum(name == block for name in topology.blocks.values())
        return total if 1 < total <= whole else None
    found = math.gcd(total, *sizes.values())
    return found if found > 1 else None


def _of_another_kind(plan: Plan, inventory: Inventory) -> set[str]:
    """Hosts that Slurm would grant, for they have devices enough, but of another kind."""
    if plan.profile is None:
        return set()
    return {
        host.name
        for host in inventory.hosts
        if host.devices >= plan.ranks_per_host
        and (host.profile is None or host.profile.name != plan.profile)
    }


def requested(slurm: SlurmSpec, request: TopologyRequest) -> SlurmSpec:
    """`slurm` with what `request` adds to it; what the user says about hosts stands."""
    said = " ".join(slurm.sbatch_args)
    free = slurm.nodelist is None and "--nodelist" not in said
    switches, segment = slurm.switches, slurm.segment
    if free and switches is None and segment is None and "--switches" not in said:
        switches = str(request.switches) if request.switches else None
        segment = None if "--segment" in said else request.segment
    exclude = fold({*expand(slurm.exclude or ""), *request.exclude}) or None
    return replace(slurm, switches=switches, segment=segment, exclude=exclude)
