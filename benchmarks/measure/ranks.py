"""Runs a module as ranks of one torchrun, each with one thread."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

LIMIT_S = 3000.0


def run_ranks(module: str, ranks: int, folder: Path, *arguments: object) -> dict[str, Any]:
    """What rank 0 wrote to `result.json` in the folder, which the module gets before the other
    arguments."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={ranks}", "-m", module, str(folder), *map(str, arguments)]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, timeout=LIMIT_S, env=environ)
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return result
