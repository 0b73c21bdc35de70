"""How fast the simulation is, against the limit of 20 minutes for 10,000 histories on two cores.

python -m benchmarks.simulation [SEEDS]
"""

import os
import resource
import sys
import time

from benchmarks.measure.timing import machine
from orchestrator.simulation.many_seeds import outcomes, summarise

LIMIT_S = 1200.0
"""For SEEDS, on two cores."""
SEEDS = 10_000
CORES = 2


def main(seeds: int) -> None:
    cores = min(CORES, len(os.sched_getaffinity(0)))
    begun = time.perf_counter()
    total = summarise(outcomes(range(seeds), processes=cores))
    took = time.perf_counter() - begun
    allowed = LIMIT_S * seeds / SEEDS
    print(machine())
    cpu = sum(cpu_s(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    print(f"{seeds} seeds in {took:.1f} s on {cores} cores: {took / allowed:.2f} of the limit")
    print(f"{seeds / took:.0f} seeds/s, {total.events / took:.0f} events/s")
    share = cpu / (cores * allowed)
    print(f"{cpu:.1f} s of CPU, {seeds / cpu:.0f} seeds a second of it: {share:.2f} of the limit")
    print(f"{total.virtual_s / 3600:.0f} h of virtual time, {total.incidents} incidents")
    print(f"{len(total.broken)} seeds broke a law")
    if total.broken or took > allowed:
        sys.exit(1)


def cpu_s(who: int) -> float:
    """What counts where others take the cores meanwhile."""
    used = resource.getrusage(who)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else SEEDS)
