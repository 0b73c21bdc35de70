"""Requests hosts from Slurm that are as near to each other as the hosts of the plan.

A request cannot name the plan's hosts, because they may be busy when the job starts. It gives the
number of leaf switches or the number of hosts per block, and excludes hosts that do not fit.
"""

import math
from collections import Counter

from msgspec import Struct
from msgspec.structs import replace

from orchestrator.contract.plan import Plan
from orchestrator.contract.spec.slurm_spec import SlurmSpec
from orchestrator.inventory.hosts import Inventory
from orchestrator.inventory.slurm.hostlist import expand, fold
from orchestrator.inventory.slurm.topology import Topology


class TopologyRequest(Struct, frozen=True, kw_only=True):
    switches: int | None = None
    """Largest number of leaf switches. Slurm waits for it (`max_switch_wait`), then uses more."""
    segment: int | None = None
    """Number of hosts that must be in one block."""
    exclude: tuple[str, ...] = ()


def request_of(
    plan: Plan, inventory: Inventory, topology: Topology, spares: int
) -> TopologyRequest:
    """The request for the hosts of `plan` and `spares` more."""
    total = len(plan.hosts) + spares
    return TopologyRequest(
        switches=_switches(plan, inventory, topology, total) if topology.kind == "tree" else None,
        segment=_segment(plan, topology, total) if topology.kind == "block" else None,
        exclude=(*sorted(_of_another_kind(plan, inventory)),),
    )


def _switches(plan: Plan, inventory: Inventory, topology: Topology, total: int) -> int | None:
    """Number of switches above the plan's hosts, plus as many of the fullest others as the spares
    need; None if any hosts fit, or if the switch of a host is unknown."""
    able = [host.name for host in inventory.with_devices(plan.ranks_per_host)]
    # With an unknown switch, a limit could exclude hosts that would fit.
    if not all(topology.switches.get(host) for host in (*plan.hosts, *able)):
        return None
    room = Counter(topology.switches[host] for host in able)
    used = {topology.switches[host] for host in plan.hosts}
    # Spares that do not fit below the plan's own switches need more of them.
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
    # A limit that allows all switches of the cluster says nothing.
    return count if count < len(leaves) else None


def _segment(plan: Plan, topology: Topology, total: int) -> int | None:
    """The largest segment of which each block of the plan holds a multiple. Spares must fit in too,
    because Slurm accepts only a segment that divides the number of hosts."""
    if not all(host in topology.blocks for host in plan.hosts):
        return None
    sizes = Counter(topology.blocks[host] for host in plan.hosts)
    if len(sizes) == 1:  # one block holds the whole plan: keep everything together if it is enough
        (block,) = sizes
        whole = sum(name == block for name in topology.blocks.values())
        return total if 1 < total <= whole else None
    found = math.gcd(total, *sizes.values())
    return found if found > 1 else None


def _of_another_kind(plan: Plan, inventory: Inventory) -> set[str]:
    """Hosts with enough devices, which Slurm would grant, but with another kind of device."""
    if plan.profile is None:
        return set()
    return {
        host.name
        for host in inventory.hosts
        if host.devices >= plan.ranks_per_host
        and (host.profile is None or host.profile.name != plan.profile)
    }


def requested(slurm: SlurmSpec, request: TopologyRequest) -> SlurmSpec:
    """`slurm` with `request` added. What the user wrote about hosts wins."""
    said = " ".join(slurm.sbatch_args)
    free = slurm.nodelist is None and "--nodelist" not in said
    switches, segment = slurm.switches, slurm.segment
    if free and switches is None and segment is None and "--switches" not in said:
        switches = str(request.switches) if request.switches else None
        segment = None if "--segment" in said else request.segment
    exclude = fold({*expand(slurm.exclude or ""), *request.exclude}) or None
    return replace(slurm, switches=switches, segment=segment, exclude=exclude)
