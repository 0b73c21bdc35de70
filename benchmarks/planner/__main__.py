"""How long a plan takes to find, how much memory that takes, and how both grow with hosts.

    python -m benchmarks.planner

Llama 3 on hosts of eight H100, everything left to the planner, each in a process of its own: CPU
seconds (one core does all of it) of `plan(...)` after start-up, and the largest resident memory of
the whole process. Limits: 8 hosts 100 ms; 405B on 2,048 hosts 5 s and 1 GiB.
"""

import json
import resource
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

MODELS: Mapping[str, Mapping[str, int]] = {
    "llama3-8b": {"hosts": 8, "batch": 128},
    "llama3-70b": {"hosts": 32, "batch": 512},
    "llama3-405b": {"hosts": 2048, "batch": 2048},
}
GROWTH = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
LIMITS = {("llama3-8b", 8): (0.1, None), ("llama3-405b", 2048): (5.0, 1 << 30)}
REPEATS = 5
"""The least counts, for other work on the machine slows a run down even in CPU seconds."""


def main() -> None:
    print("model         hosts   ranks   meshes        plan     process  step")
    for model, hosts in (*LIMITS, *(("llama3-70b", hosts) for hosts in GROWTH[2:])):
        runs = [measured(model, hosts) for _ in range(REPEATS)]
        best = min(runs, key=lambda run: run["seconds"])
        seconds, size = best["seconds"], best["peak_bytes"]
        limit_s, limit_bytes = LIMITS.get((model, hosts), (None, None))
        within = (limit_s is None or seconds <= limit_s) and (
            limit_bytes is None or size <= limit_bytes
        )
        verdict = "" if limit_s is None else "  within" if within else "  ABOVE"
        print(
            f"{model:<12} {hosts:>6} {hosts * 8:>7} {best['meshes']:>8} {1e3 * seconds:>8.0f} ms"
            f" {size / 2**20:>7.0f} MiB  {best['step_s']:.2f} s{verdict}"
        )


def measured(model: str, hosts: int) -> dict[str, Any]:
    command = [sys.executable, __file__, model, str(hosts)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def measure(model: str, hosts: int) -> None:
    from orchestrator.contract.codec import decode
    from orchestrator.contract.spec.job_spec import JobSpec
    from orchestrator.contract.spec.model_presets import PRESETS
    from orchestrator.inventory.file import load_inventory
    from orchestrator.plan.planner import plan

    batch = max(hosts, MODELS[model]["batch"])
    spec: JobSpec = decode(
        JobSpec,
        {
            "name": "benchmark",
            "model": {"preset": model},
            "data": {"files": "x", "sequence_length": 8192},
            "train": {"steps": 1, "global_batch_size": batch, "dtype": "bfloat16"},
            "cluster": {"hosts": hosts, "gpus_per_host": 8},
        },
    )
    text = f"{{profile: h100-sxm-80gb, hosts: {hosts}, devices_per_host: 8, hosts_per_leaf: 16}}"
    inventory = load_inventory(text.replace("leaf: 16", f"leaf: {min(hosts, 16)}"), "benchmark")
    begun = time.process_time()
    found = plan(spec, inventory, PRESETS[model])
    seconds = time.process_time() - begun
    assert found.time is not None
    meshes = sum(one.count for one in found.rejected) + len(found.alternatives) + 1
    peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    body = {"seconds": seconds, "peak_bytes": peak, "meshes": meshes, "step_s": found.time.step_s}
    print(json.dumps(body))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        measure(sys.argv[1], int(sys.argv[2]))
    else:
        main()
