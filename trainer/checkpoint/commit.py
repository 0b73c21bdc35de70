"""Turns a folder of finished writes into a complete checkpoint, and removes those past their time.

Plain files and no torch: what makes a checkpoint complete is written in `contract/checkpoints.py`.
"""

import json
import os
import shutil
from pathlib import Path

from orchestrator.contract.checkpoints import MARKER, defect_of, final_name, step_of


def commit(partial: Path, *, step: int, attempt: int, world_size: int) -> None:
    """Complete `partial`, now that every rank has written; a torn one of the step is replaced."""
    files = {path.name: path.stat().st_size for path in partial.iterdir() if path.name != MARKER}
    marker = {"step": step, "attempt": attempt, "world_size": world_size, "files": files}
    with (partial / MARKER).open("w") as file:
        json.dump(marker, file)
        file.flush()
        os.fsync(file.fileno())
    _sync_folder(partial)
    final = partial.with_name(final_name(step))
    if final.exists():
        shutil.rmtree(final)
    partial.rename(final)
    _sync_folder(final.parent)


def remove_old(checkpoints: Path, keep: int) -> None:
    """Keep the newest `keep` complete checkpoints, and nothing older or left half-written.

    To be called when no write is going on.
    """
    folders = {path: step_of(path.name) for path in checkpoints.iterdir()}
    steps = sorted(
        step for path, step in folders.items() if step is not None and not defect_of(path)
    )
    oldest_kept = steps[-keep:][0] if steps else 0
    for path, step in folders.items():
        if step is not None and (step < oldest_kept or ".partial-" in path.name):
            shutil.rmtree(path, ignore_errors=True)


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
