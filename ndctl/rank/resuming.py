"""`ndctl.latest_checkpoint`: where the ranks resume."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ndctl.rank.agreement import Ranks, ranks_of_script
from ndctl.rank.checkpoint_files import (
    damage,
    final_name,
    newest_complete,
    read_marker,
    shares,
    step_of,
)
from ndctl.rank.link import Link, current
from ndctl.rank.place import Place, place

CALL = "ndctl.latest_checkpoint()"
TIMEOUT_S = 1800.0
"""Ranks read the whole checkpoint to verify it."""

Skipped = list[tuple[str, str]]
"""Name and reason of newer checkpoints that cannot be used."""


def latest_checkpoint() -> Path | None:
    """The newest complete checkpoint; None if there is none, so that training starts at step 0.

        folder = ndctl.latest_checkpoint()
        if folder is not None:
            state = torch.load(folder / "model.pt")

    Call it on every rank, after `torch.distributed.init_process_group`: rank 0 then decides for
    all, and the ranks verify the checksums together (`checkpoint.verify`). Before that, each rank
    looks for itself, and only sizes are compared.

    Torn and damaged checkpoints are never given. A job that starts fresh (`ndctl submit --new`)
    gets none until it has saved one itself. The folder's name ends with the number of its step.

    Raises:
        RuntimeError: some ranks did not call it.
    """
    link, where = current(), place()
    if not where.resume and link.saved is not None:
        # The folder may also have newer checkpoints of another run.
        return where.checkpoints / final_name(link.saved)
    ranks = ranks_of_script(link.rank, link.world_size)
    folder, skipped = find_checkpoint(ranks, where) if where.resume else (None, [])
    step = (step_of(folder.name) or 0) if folder is not None else 0
    if link.saved is None:  # later calls do not tell where the ranks resume
        _tell(link, step, skipped)
    return folder


def find_checkpoint(ranks: Ranks | None, where: Place) -> tuple[Path | None, Skipped]:
    refused: dict[str, str] = {}
    while True:
        name, skipped = _agreed(ranks, where, refused)
        if name is None:
            return None, skipped
        folder = where.checkpoints / name
        defect = _verified(ranks, folder) if ranks is not None and where.verify else ""
        if not defect:
            return folder, skipped
        refused[name] = defect


def _agreed(
    ranks: Ranks | None, where: Place, refused: Mapping[str, str]
) -> tuple[str | None, Skipped]:
    def newest(_: object) -> Any:
        folder, skipped = newest_complete(where.checkpoints, refused)
        return [folder and folder.name, [list(one) for one in skipped]]

    if ranks is None:
        name, skipped = newest(None)
    else:
        # Rank 0 decides, because other hosts may see changes of a shared folder later.
        name, skipped = ranks.agree("resume", None, newest, TIMEOUT_S, CALL)
    return name, [(one, why) for one, why in skipped]


def _verified(ranks: Ranks, folder: Path) -> str:
    """The first defect in a file of `folder`, the same on every rank; empty if there is none."""
    try:
        marker = read_marker(folder)
        checksums: dict[str, str] = marker.get("sha256", {})
        sizes = {name: marker["files"][name] for name in checksums}
        found = damage(folder, checksums, shares(sizes, ranks.size)[ranks.rank]) or ""
    except (OSError, ValueError, KeyError, TypeError) as exc:
        found = f"its marker cannot be read ({exc})"
    defect: str = ranks.agree(
        "verify", found, lambda all_: next(filter(None, all_), ""), TIMEOUT_S, CALL
    )
    return defect


def _tell(link: Link, step: int, skipped: Skipped) -> None:
    link.step, link.resumed = step, True
    if link.rank == 0:
        passed = [{"name": name, "why": why} for name, why in skipped]
        link.send(
            {
                "kind": "TrainingResumed",
                "attempt": link.attempt,
                "step": step,
                "passed_over": passed,
            }
        )
