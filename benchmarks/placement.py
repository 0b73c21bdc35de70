"""How long placement takes as clusters grow, and how near it comes to a lower bound.

    python -m benchmarks.placement [CASES]

Limit: 12,500 hosts x 8 devices in 10 s on one core. CASES random clusters (200) are compared with
the lower bound of `tests/plan/placement/placement_bound.py`.
"""

import statistics
import sys
import time

from benchmarks.measure.timing import machine
from orchestrator.contract.mesh import Mesh
from orchestrator.inventory.generate import regular, worn
from orchestrator.inventory.hosts import tree_of
from orchestrator.plan.placement.arrange import arrange
from tests.plan.placement.placement_trees import large_case, traffic
from tests.plan.placement.test_arrange import bound_of

SIZES = {8: (1, 1, 8), 64: (1, 4, 16), 512: (4, 4, 32), 2048: (16, 4, 32), 12500: (10, 10, 125)}
"""Hosts -> pp, dp_replicate, dp_shard of the nodes."""
LIMIT_S = 10.0


def main(cases: int) -> int:
    print(machine())
    slowest = max(seconds_for(hosts, worn_out) for hosts in SIZES for worn_out in (False, True))
    totals, upper, names = [], [], []
    for seed in range(cases):
        mesh, switches, sent = large_case(seed)
        found = arrange(mesh, 8, switches, switches, sent)
        leaving = found.cost.crossing[0]
        least = bound_of(mesh, switches, sent, leaving)
        totals.append(found.cost.total / least)
        names.append(found.by_name.total / least)
        if least > leaving:
            upper.append((found.cost.total - leaving) / (least - leaving))
    print(f"{cases} random clusters, cost as a multiple of the lower bound:")
    for what, ratios in (("placed", totals), ("by name", names), ("above hosts alone", upper)):
        ratios.sort()
        print(
            f"  {what:<18} median {statistics.median(ratios):.3f}"
            f"  95% {ratios[int(0.95 * len(ratios))]:.3f}  worst {ratios[-1]:.3f}"
        )
    return 0 if slowest <= LIMIT_S else 1


def seconds_for(hosts: int, worn_out: bool) -> float:
    """Seconds of one core for a placement on so many hosts. If they are worn out, every tenth host
    is busy or lacks a device, and the job uses 4/5 of them."""
    pp, replicate, shard = SIZES[hosts]
    inventory = regular(None, hosts, 8, (16, 256))
    if worn_out:
        inventory, shard = worn(inventory, seed=1), max(1, shard * 4 // 5)
    able = inventory.with_devices(8)
    mesh = Mesh(pp=pp, dp_replicate=replicate, dp_shard=shard, tp=8)
    sent = (
        traffic("pp", 10**6, "send"),
        traffic("dp_replicate", 10**7, "all-reduce"),
        traffic("dp_shard", 10**8),
        traffic("tp", 10**9, "all-reduce"),
    )
    begun = time.process_time()
    found = arrange(mesh, 8, [host.name for host in able], tree_of(able), sent)
    seconds = time.process_time() - begun
    print(
        f"{len(able):>6} hosts{' (worn)' if worn_out else '':<7} {seconds:7.3f} s"
        f"   cost {found.cost.total / found.by_name.total:.3f} of the order by name"
    )
    return seconds


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 200))
