"""Checkpoint folders: names, the marker of a complete one, and which one to resume from.

A save writes to `step-<s>.partial-<attempt>`, adds the marker last and then renames the folder to
`step-<s>`. So a folder `step-<s>` with a marker was completely written, and any other folder was
not. Later damage shows only in the checksums, for which all files must be read.
"""

import hashlib
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from msgspec import Struct

from orchestrator.contract.codec import decode
from orchestrator.contract.read_json import read_json
from orchestrator.contract.spec.model_spec import LoraSpec

MARKER = "COMPLETE"
"""JSON: `step`, `attempt`, `world_size`, `files` (name -> size in bytes), `sha256` (name ->
checksum in hexadecimal digits) and `trained` (a `Trained`)."""


class SkippedCheckpoint(Struct, frozen=True):
    """A checkpoint that cannot be resumed from."""

    name: str
    why: str


class Trained(Struct, frozen=True, kw_only=True):
    """Parts of the spec that must not change when a job resumes from the checkpoint. `submit`
    compares them, so that a job that its ranks would refuse is not queued."""

    config: Mapping[str, Any]
    """Of the transformers model."""
    lora: LoraSpec | None = None
    """Of the adapters, if only they are trained."""
    seed: int
    global_batch_size: int
    sequence_length: int


def final_name(step: int) -> str:
    return f"step-{step}"


def partial_name(step: int, attempt: int) -> str:
    return f"step-{step}.partial-{attempt}"


def step_of(name: str) -> int | None:
    """Step in the name of a checkpoint folder, complete or partial; None for any other name."""
    found = re.fullmatch(r"step-(\d+)(\.partial-\d+)?", name)
    return int(found[1]) if found else None


def defect_of(folder: Path) -> str | None:
    """Why `folder` is not a complete checkpoint; None if it is. Reads no data."""
    if ".partial-" in folder.name:
        return "its write was interrupted"
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
    """Raises OSError or ValueError if no marker can be read."""
    marker: dict[str, Any] = read_json((folder / MARKER).read_text())
    return marker


def trained(folder: Path) -> Trained | None:
    """What the checkpoint was made with; None if its marker does not say."""
    try:
        found: Trained = decode(Trained, read_marker(folder)["trained"])
    except (OSError, ValueError, KeyError):  # written by an older ndctl, or deleted meanwhile
        return None
    return found


def checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def damage(folder: Path, checksums: Mapping[str, str], names: Iterable[str]) -> str | None:
    """The first problem with the files `names`, compared with `checksums`; None if there is
    none."""
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
) -> tuple[Path | None, tuple[SkippedCheckpoint, ...]]:
    """The newest complete checkpoint, and the newer ones that are skipped, each with its reason.

    `damaged` has checkpoints whose files were read and found wrong, each with its reason.
    """
    folders = [f for f in checkpoints.glob("step-*") if step_of(f.name) is not None]
    passed: list[SkippedCheckpoint] = []
    for folder in sorted(folders, key=lambda f: (step_of(f.name) or 0, f.name), reverse=True):
        defect = damaged.get(folder.name) or defect_of(folder)
        if defect is None:
            return folder, tuple(passed)
        passed.append(SkippedCheckpoint(folder.name, defect))
    return None, tuple(passed)


def superfluous(
    complete: Collection[int], step: int, keep: int, keep_every: int | None
) -> set[int]:
    """Steps of complete checkpoints that may be deleted now that the one of `step` is complete.

    The newest `keep` stay, and those at multiples of `keep_every`. Checkpoints of later steps are
    neither counted nor deleted: the job skipped them when it resumed from an earlier one.
    """
    past = sorted(s for s in complete if s <= step)
    return {s for s in past[:-keep] if not (keep_every and s % keep_every == 0)}
