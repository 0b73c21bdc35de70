"""Turns a folder of written files into a complete checkpoint, and removes old checkpoints.

`contract/files/checkpoint_names.py` defines when a checkpoint is complete.
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.contract.codec import encode
from orchestrator.contract.files.checkpoint_names import (
    MARKER,
    Trained,
    defect_of,
    final_name,
    step_of,
    superfluous,
)
from orchestrator.contract.spec.job_spec import CheckpointSpec
from trainer.rank.durable import sync


@dataclass(frozen=True, slots=True)
class Written:
    """A file, as reported by the rank that wrote it."""

    size: int
    """Bytes."""
    sha256: str


def commit(
    partial: Path,
    files: Mapping[str, Written],
    trained: Trained | None,
    *,
    step: int,
    attempt: int,
    world_size: int,
) -> None:
    """Complete `partial`, whose `files` are written and synced. Replaces a checkpoint of `step`.

    Raises:
        OSError: writing failed, or a file is missing or has a different size than was written.
    """
    for name, file in files.items():
        if (size := (partial / name).stat().st_size) != file.size:
            raise OSError(f"{partial / name} has {size} bytes, but {file.size} were written")
    marker: dict[str, Any] = {
        "step": step,
        "attempt": attempt,
        "world_size": world_size,
        "files": {name: file.size for name, file in files.items()},
        "sha256": {name: file.sha256 for name, file in files.items()},
    }
    if trained is not None:
        marker["trained"] = encode(trained)
    (partial / MARKER).write_text(json.dumps(marker))
    sync(partial / MARKER)
    sync(partial)
    final = partial.with_name(final_name(step))
    # The step was saved before: by an attempt that was rolled back, or incompletely.
    if final.exists():
        shutil.rmtree(final)
    # The rename comes last: a checkpoint has its final name only if all its files are on the disk.
    partial.rename(final)
    sync(final.parent)


def remove_old(checkpoints: Path, step: int, spec: CheckpointSpec) -> None:
    """Remove old and partial checkpoints, now that the checkpoint of `step` is complete.

    Call it while no save is in progress.
    """
    folders = {path: step_of(path.name) for path in checkpoints.iterdir()}
    complete = {s for path, s in folders.items() if s is not None and not defect_of(path)}
    removable = superfluous(complete, step, spec.keep, spec.keep_every)
    oldest_kept = min(complete - removable, default=0)
    for path, folder_step in folders.items():
        if folder_step is None:
            continue  # not a checkpoint: a file of the user's, for example
        # Damaged ones are removed once they are older than all checkpoints that are kept.
        damaged = folder_step < oldest_kept and folder_step not in complete
        if folder_step in removable or damaged or ".partial-" in path.name:
            shutil.rmtree(path, ignore_errors=True)
