"""The bundled trainer against Accelerate's FSDP2, on the same two ranks, model, data and seed.

    python -m benchmarks.trainer [ALTERNATIONS]

All contestants live in the same two processes and train a few steps each in turn, so that whatever
else the machine does hits them alike. Both sides take the mean loss and the gradient norm of every
step to the host, clip, and update with fused AdamW. Accelerate gets its batches ready-made; ours
reads its own. Target: at least 1.05 of Accelerate at the same mesh.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from benchmarks.timing import machine, ratio, spread

STEPS = 8
"""That one contestant trains before it is the next one's turn."""
RANKS = 2
LIMIT_S = 1500.0
PAIRS = {
    "fsdp": "accelerate fsdp2",
    "fsdp, prefetch off": "accelerate fsdp2",
    "fsdp without reshard": "accelerate fsdp2 without reshard",
    "ddp": "accelerate ddp",
}
"""Ours -> theirs at the same mesh."""


def main(alternations: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "rates.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={RANKS}", "-m", "benchmarks.contestants"]
        subprocess.run(
            [*command, folder, str(alternations), str(STEPS)],
            check=True,
            timeout=LIMIT_S,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        rates: Mapping[str, list[float]] = json.loads(answer.read_text())
    print(machine())
    for name, values in rates.items():
        print(f"{name:<34} {spread(values, 'tokens/s', 0)}")
    for ours, theirs in PAIRS.items():
        print(f"{ours} / {theirs}: {ratio(rates, ours, theirs)}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 7)
