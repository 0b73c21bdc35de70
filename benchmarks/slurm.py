"""What ndctl takes on Slurm, as multiples of what Slurm's own commands take in the same run.

    python -m benchmarks.slurm [RUNS]

Inventory: a slurmctld with 10,000 nodes of 8 GPUs and no slurmd's, read as `ndctl inventory
--backend slurm` reads it. Limit: 1 s with the commands.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from benchmarks.timing import machine, ratio, spread
from orchestrator.backends.slurm.inventory import NODES, TOPOLOGY, read_cluster
from orchestrator.cluster.slurm.gpus import gpu_table
from orchestrator.cluster.slurm.inventory import Use
from orchestrator.system import run_command

INVENTORY = Path(__file__).parents[1] / "slurm" / "testbed" / "slurm_inventory.sh"
NODE_COUNT, GPUS = 10_000, 8
LIMIT_S = 1.0


def main(runs: int) -> None:
    print(machine())
    times = inventory_times(runs)
    print(f"inventory of {NODE_COUNT:,} nodes x {GPUS} GPUs")
    for name, values in times.items():
        print(f"  {name:<40} {spread([1e3 * value for value in values], 'ms', 0)}")
    print(
        f"  ours over the commands alone: {ratio(times, 'ndctl: commands and reading', COMMANDS)}"
    )
    middle = statistics.median(times["ndctl: commands and reading"])
    print(f"  limit {LIMIT_S:.0f} s: {'held' if middle <= LIMIT_S else 'NOT held'}")


COMMANDS = "scontrol show nodes, show topology"


def inventory_times(runs: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {COMMANDS: [], "ndctl: commands and reading": []}
    with many_nodes():
        for _ in range(runs):
            begun = time.perf_counter()
            for argv in (NODES, TOPOLOGY):
                subprocess.run(argv, stdout=subprocess.DEVNULL, check=True)
            times[COMMANDS].append(time.perf_counter() - begun)
            begun = time.perf_counter()
            found = read_cluster(run_command, None, whole=True).inventory(gpu_table({}), Use())
            times["ndctl: commands and reading"].append(time.perf_counter() - begun)
            assert len(found.hosts) == NODE_COUNT
            assert all(host.devices == GPUS and len(host.switches) == 3 for host in found.hosts)
    return times


@contextmanager
def many_nodes() -> Iterator[None]:
    """A slurmctld alone, which SLURM_CONF then names."""
    with tempfile.TemporaryDirectory(prefix="ndctl-slurm-bench-") as folder:
        before: Mapping[str, str] = dict(os.environ)
        os.environ["SLURM_CONF"] = f"{folder}/etc/slurm.conf"
        try:
            start = [str(INVENTORY), "start", folder, str(NODE_COUNT), str(GPUS)]
            subprocess.run(start, stdout=subprocess.DEVNULL, check=True, timeout=120)
            yield
        finally:
            subprocess.run([str(INVENTORY), "stop", folder], check=True, timeout=120)
            os.environ.clear()
            os.environ.update(before)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 10)
