"""Checkpoint folders: their names, the marker that makes one complete, which to resume from.

A save goes to `step-<s>.partial-<attempt>`, gets its marker last and is then renamed to `step-<s>`.
So a folder named `step-<s>` with a marker is whole, and whatever else lies there never was. Whether
its files still are what was written is told by their checksums, which takes reading them.
"""

import hashlib
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from orchestrator.contract.codec import decode
from orchestrator.contract.read_json import read_json
from orchestrator.contract.spec.model_spec import LoraSpec

MARKER = "COMPLETE"
"""JSON: `step`, `attempt`, `world_size`, `files`, name to size in bytes, `sha256`, name to checksum
in hexadecimal digits, and `trained`, a `Trained`."""


@dataclass(frozen=True, slots=True)
class PassedOver:
    """A checkpoint that cannot be resumed from."""

    name: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """What a job must not change that resumes from the checkpoint, as far as its spec says it: so
    that a job that would be refused is not queued."""

    config: Mapping[str, Any]
    """Of the transformers model."""
    lora: LoraSpec | None = None
    """Of the adapters, where only they are trained."""
    seed: int
    global_batch_size: int
    sequence_length: int


def final_name(step: int) -> str:
    return f"step-{step}"


def partial_name(step: int, attempt: int) -> str:
    return f"step-{step}.partial-{attempt}"


def step_of(name: str) -> int | None:
    """The step in a checkpoint folder's name, complete or partial; None for any other name."""
    found = re.fullmatch(r"step-(\d+)(\.partial-\d+)?", name)
    return int(found[1]) if found else None


def defect_of(folder: Path) -> str | None:
    """Why `folder` is not a complete checkpoint, or None when it is one; reads no data."""
    if ".partial-" in folder.name:
        return "its write was cut short"
    try:
        marker = read_marker(folder)
        sizes = {name: (folder / name).stat().st_size for name in marker["files"]}
    except FileNotFoundError as exc:
        return f"{Path(exc.filename).name} is missing"
    except (OSError, ValueError, KeyError, TypeError) as exc:
        return f"its marker cannot be read ({exc})"
    torn = [name for name, size in sizes.items() if size != marker["files"][name]]
    return f"{torn[0]} has another size than its marker says" if torn else None


def read_marker(folder: Path) -> dict[str, Any]:
    """Raises OSError or ValueError when there is none that can be read."""
    marker: dict[str, Any] = read_json((folder / MARKER).read_text())
    return marker


def trained(folder: Path) -> Trained | None:
    """What the checkpoint was made by; None where its marker does not say."""
    try:
        found: Trained = decode(Trained, read_marker(folder)["trained"])
    except (OSError, ValueError, KeyError):  # an older one, or it vanished meanwhile
        return None
    return found


def checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def damage(folder: Path, checksums: Mapping[str, str], names: Iterable[str]) -> str | None:
    """What is wrong with the first of the files `names` that is not as `checksums` say."""
    for name in names:
        try:
            same = checksum(folder / name) == checksums[name]
        except OSError as exc:
            return f"{name} cannot be read ({exc.strerror})"
        if not same:
            return f"{name} has another checksum than its marker says"
    return None


NONE: Mapping[str, str] = MappingProxyType({})


def newest_complete(
    checkpoints: Path, damaged: Mapping[str, str] = NONE
) -> tuple[Path | None, tuple[PassedOver, ...]]:
    """The newest complete checkpoint, and the newer ones passed over, each with its reason.

    `damaged` are names of those whose files were read and found wrong, each with its reason.
    """
    folders = [f for f in checkpoints.glob("step-*") if step_of(f.name) is not None]
    passed: list[PassedOver] = []
    for folder in sorted(folders, key=lambda f: (step_of(f.name) or 0, f.name), reverse=True):
        defect = damaged.get(folder.name) or defect_of(folder)
        if defect is None:
            return folder, tuple(passed)
        passed.append(PassedOver(folder.name, defect))
    return None, tuple(passed)


def superfluous(
    complete: Collection[int], step: int, keep: int, keep_every: int | None
) -> set[int]:
    """Which of the complete checkpoints may go now that the one of `step` is complete.

    The newest `keep` stay, and those at multiples of `keep_every`. Ones of later steps are neither
    counted nor removed: the job passed over them when it went on from an earlier one.
    """
    past = sorted(s for s in complete if s <= step)
    return {s for s in past[:-keep] if not (keep_every and s % keep_every == 0)}
