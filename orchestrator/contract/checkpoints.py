"""Checkpoint folders: their names, the marker that makes one complete, which to resume from.

A save goes to `step-<s>.partial-<attempt>`, gets its marker last and is then renamed to `step-<s>`.
So a folder named `step-<s>` with a marker is whole, and whatever else lies there never was.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path

MARKER = "COMPLETE"
"""JSON: `step`, `attempt`, `world_size`, and `files`, name to size in bytes."""


@dataclass(frozen=True, slots=True)
class PassedOver:
    """A checkpoint that cannot be resumed from."""

    name: str
    why: str


def final_name(step: int) -> str:
    return f"step-{step}"


def partial_name(step: int, attempt: int) -> str:
    return f"step-{step}.partial-{attempt}"


def step_of(name: str) -> int | None:
    """The step in a checkpoint folder's name, complete or partial; None for any other name."""
    found = re.fullmatch(r"step-(\d+)(\.partial-\d+)?", name)
    return int(found[1]) if found else None


def defect_of(folder: Path) -> str | None:
    """Why `folder` is not a complete checkpoint, or None when it is one."""
    if ".partial-" in folder.name:
        return "its write was cut short"
    try:
        marker = json.loads((folder / MARKER).read_text())
        sizes = {name: (folder / name).stat().st_size for name in marker["files"]}
    except FileNotFoundError as exc:
        return f"{Path(exc.filename).name} is missing"
    except (OSError, ValueError, KeyError, TypeError) as exc:
        return f"its marker cannot be read ({exc})"
    torn = [name for name, size in sizes.items() if size != marker["files"][name]]
    return f"{torn[0]} has another size than its marker says" if torn else None


def newest_complete(checkpoints: Path) -> tuple[Path | None, tuple[PassedOver, ...]]:
    """The newest complete checkpoint, and the newer ones passed over, each with its reason."""
    folders = [f for f in checkpoints.glob("step-*") if step_of(f.name) is not None]
    passed: list[PassedOver] = []
    for folder in sorted(folders, key=lambda f: (step_of(f.name) or 0, f.name), reverse=True):
        defect = defect_of(folder)
        if defect is None:
            return folder, tuple(passed)
        passed.append(PassedOver(folder.name, defect))
    return None, tuple(passed)
