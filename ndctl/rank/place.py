"""Where a rank keeps its files, and for how long."""

import functools
import json
import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

from ndctl.rank.fence import Admit, admit_all, admit_attempt
from ndctl.rank.link import current


class Place(NamedTuple):
    run_dir: Path
    """The job's run directory. Without ndctl it is the working directory, or NDCTL_RUN_DIR."""
    keep: int
    """Complete checkpoints that stay."""
    keep_every: int | None
    """Checkpoints at multiples of this step also stay."""
    verify: bool
    """Make checksums, and compare them before a resume."""
    resume: bool
    """False: the job starts at step 0, although its directory may have checkpoints."""
    admit: Admit
    """Called before each write."""

    @property
    def checkpoints(self) -> Path:
        return self.run_dir / "checkpoints"

    @property
    def metrics(self) -> Path:
        return self.run_dir / "metrics.jsonl"


@functools.cache
def place() -> Place:
    link = current()
    run_dir = Path(os.environ.get("NDCTL_RUN_DIR", ".")).absolute()
    # Without ndctl nothing is removed: the folder may have checkpoints of other runs.
    spec: dict[str, Any] = json.loads(os.environ.get("NDCTL_KEEP", "{}"))
    return Place(
        run_dir=run_dir,
        keep=spec.get("keep", sys.maxsize),
        keep_every=spec.get("keep_every"),
        verify=spec.get("verify", True),
        resume=os.environ.get("NDCTL_RESUME") != "none",
        admit=admit_attempt(run_dir / "fence.json", link.attempt) if link.active else admit_all,
    )
