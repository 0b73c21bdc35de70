"""Checkpoint folders: names, the marker of a complete one, which one to resume from, and which ones
are removed.

A save writes to `step-<s>.partial-<attempt>`, adds the marker last and then renames the folder to
`step-<s>`. So a folder `step-<s>` with a marker was completely written, and any other folder was
not. Later damage shows only in the checksums, for which all files must be read.
"""

import heapq
import json
import os
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from ndctl.rank.regular_file import open_regular, read_regular

MARKER = "COMPLETE"
"""JSON: `step`, `attempt`, `world_size`, `files` (name -> size in bytes), `sha256` (name ->
checksum in hexadecimal digits), and in checkpoints of the bundled trainer `trained`."""


class Written(NamedTuple):
    """A file, as reported by the rank that wrote it."""

    size: int
    """Bytes."""
    sha256: str | None
    """None: no checksum was made."""


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
    try:
        marker = json.loads(read_regular(folder / MARKER))
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    if not isinstance(marker, dict):
        raise ValueError("it is no JSON object")
    return marker


def checksum(path: Path) -> str:
    """SHA-256 in hexadecimal digits. Raises OSError."""
    import hashlib  # here, because most scripts that import `ndctl` write no checkpoint

    with open_regular(path) as file:
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


def shares(sizes: Mapping[str, int], num_ranks: int) -> list[list[str]]:
    """The files that each rank reads. Largest first, a file goes to the rank with least bytes."""
    given: list[list[str]] = [[] for _ in range(num_ranks)]
    loads = [(0, rank) for rank in range(num_ranks)]
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        load, rank = loads[0]
        given[rank].append(name)
        heapq.heapreplace(loads, (load + sizes[name], rank))
    return given


NONE: Mapping[str, str] = MappingProxyType({})


def newest_complete(
    checkpoints: Path, damaged: Mapping[str, str] = NONE
) -> tuple[Path | None, tuple[tuple[str, str], ...]]:
    """The newest complete checkpoint, and the newer ones that are skipped: name and reason.

    `damaged` has checkpoints whose files were read and found wrong, each with its reason.
    """
    folders = [f for f in checkpoints.glob("step-*") if step_of(f.name) is not None]
    skipped: list[tuple[str, str]] = []
    for folder in sorted(folders, key=lambda f: (step_of(f.name) or 0, f.name), reverse=True):
        defect = damaged.get(folder.name) or defect_of(folder)
        if defect is None:
            return folder, tuple(skipped)
        skipped.append((folder.name, defect))
    return None, tuple(skipped)


def commit(
    partial: Path,
    files: Mapping[str, Written],
    more: Mapping[str, Any] = NONE,
    *,
    step: int,
    attempt: int,
    world_size: int,
) -> None:
    """Complete `partial`, whose `files` are written and synced. Replaces a checkpoint of `step`.

    Args:
        more: further keys of the marker.

    Raises:
        OSError: writing failed, or a file is missing or has a different size than was written.
    """
    import shutil

    for name, file in files.items():
        if (size := (partial / name).stat().st_size) != file.size:
            raise OSError(f"{partial / name} has {size} bytes, but {file.size} were written")
    marker = {
        "step": step,
        "attempt": attempt,
        "world_size": world_size,
        "files": {name: file.size for name, file in files.items()},
        "sha256": {name: file.sha256 for name, file in files.items() if file.sha256 is not None},
        **more,
    }
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


def sync(path: Path) -> None:
    """Wait until the content of a file, or the entries of a folder, are on the disk.

    Raises:
        OSError: the sync failed, or an earlier write that returned without error did.
    """
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def remove_old(checkpoints: Path, step: int, keep: int, keep_every: int | None = None) -> None:
    """Remove old and partial checkpoints, now that the checkpoint of `step` is complete.

    Call it while no save is in progress.

    Args:
        keep, keep_every: as in `superfluous`.
    """
    import shutil

    folders = {path: step_of(path.name) for path in checkpoints.iterdir()}
    complete = {s for path, s in folders.items() if s is not None and not defect_of(path)}
    removable = superfluous(complete, step, keep, keep_every)
    oldest_kept = min(complete - removable, default=0)
    for path, folder_step in folders.items():
        if folder_step is None:
            continue  # not a checkpoint: a file of the user's, for example
        # Damaged ones are removed once they are older than all checkpoints that are kept.
        damaged = folder_step < oldest_kept and folder_step not in complete
        if folder_step in removable or damaged or ".partial-" in path.name:
            shutil.rmtree(path, ignore_errors=True)


def superfluous(
    complete: Collection[int], step: int, keep: int, keep_every: int | None
) -> set[int]:
    """Steps of complete checkpoints that may be deleted now that the one of `step` is complete.

    The newest `keep` stay, and those at multiples of `keep_every`. Checkpoints of later steps are
    neither counted nor deleted: the job skipped them when it resumed from an earlier one.
    """
    past = sorted(s for s in complete if s <= step)
    return {s for s in past[:-keep] if not (keep_every and s % keep_every == 0)}
