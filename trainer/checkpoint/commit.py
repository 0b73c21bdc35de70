"""Turns a folder of finished writes into a complete checkpoint, and removes those past their time.

Plain files and no torch: what makes a checkpoint complete is written in
`contract/files/checkpoint_names.py`.
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
    """A file as the rank that wrote it knows it."""

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
    """Complete `partial`, whose `files` are written and synced; a torn one of the step is replaced.

    Raises:
        OSError: also when not every file is there as it was written.
    """
    for name, file in files.items():
        if (partial / name).stat().st_size != file.size:
            raise OSError(f"{partial / name} is not the {file.size} bytes that were written")
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
    if final.exists():
        shutil.rmtree(final)
    partial.rename(final)
    sync(final.parent)


def remove_old(checkpoints: Path, step: int, spec: CheckpointSpec) -> None:
    """Remove what may go now that the checkpoint of `step` is complete, and what is half-written.

    To be called when no write is going on.
    """
    folders = {path: step_of(path.name) for path in checkpoints.iterdir()}
    complete = {s for path, s in folders.items() if s is not None and not defect_of(path)}
    gone = superfluous(complete, step, spec.keep, spec.keep_every)
    oldest_kept = min(complete - gone, default=0)
    for path, of in folders.items():
        if of is None:
            continue
        torn = of < oldest_kept and of not in complete
        if of in gone or torn or ".partial-" in path.name:
            shutil.rmtree(path, ignore_errors=True)
