"""What the flight recorder costs: steps of a tiny FSDP model on 2 processes with gloo, with it and
without, by turns; and how long a dump takes and how large it is. On a machine that others use, too,
the processor time of a step says more than how long it took.

    python -m benchmarks.flight_recorder [--turns 3] [--steps 60]
"""

import argparse
import json
import os
import subprocess
import sys
import time

RANKS = 2
LIMIT_S = 300.0
"""For two ranks to start, and to do their steps, on a machine that others use as well."""
SIZES = {"off": "0", "on": "2000"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--port", type=int, default=29877)
    args = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = {how: [] for how in SIZES}
    for turn in range(args.turns):
        for place, how in enumerate(SIZES):
            begun = time.perf_counter()
            one = _measured(SIZES[how], args.port + 2 * turn + place, args.steps)
            found[how].append(one)
            took = time.perf_counter() - begun
            print(
                f"turn {turn + 1} of {args.turns}, recorder {how}: {1e3 * one['step_s']:.2f} ms a"
                f" step, {1e3 * one['work_s']:.2f} of a processor, {took:.0f} s with its start",
                flush=True,
            )
    for key, what in (("step_s", "a step"), ("work_s", "its processor time")):
        least = {how: min(one[key] for one in each) for how, each in found.items()}
        print(
            f"{what}: {1e3 * least['off']:.2f} ms without, {1e3 * least['on']:.2f} ms with the"
            f" recorder: ratio {least['on'] / least['off']:.3f} (the least of {args.turns} each)"
        )
    dump = found["on"][-1]
    print(f"dump of {dump['ops']:.0f} operations: {1e3 * dump['dump_s']:.0f} ms, ", end="")
    print(f"{dump['bytes'] / 1024:.0f} KiB without stacks")


def _measured(size: str, port: int, steps: int) -> dict[str, float]:
    children = []
    for rank in range(RANKS):
        environ = {
            **os.environ,
            "TORCH_FR_BUFFER_SIZE": size,
            "RANK": str(rank),
            "WORLD_SIZE": str(RANKS),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
        }
        argv = [sys.executable, "-m", "benchmarks.flight_recorder.rank", str(steps)]
        children.append(subprocess.Popen(argv, env=environ, stdout=subprocess.PIPE, text=True))
    try:
        said = [child.communicate(timeout=LIMIT_S)[0] for child in children]
    except subprocess.TimeoutExpired:
        raise SystemExit(
            f"{steps} steps were not done within {LIMIT_S:.0f} s; try --steps {max(6, steps // 4)}"
        ) from None
    finally:
        for child in children:
            child.kill()
    if any(child.returncode for child in children):
        raise SystemExit(f"a rank failed: {[child.returncode for child in children]}")
    first: dict[str, float] = json.loads(said[0].splitlines()[-1])
    return first


if __name__ == "__main__":
    main()
