"""What ndctl itself knows about checkpoints, beside the files that `ndctl.rank` defines."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct

from ndctl.rank.checkpoint_files import NONE, read_marker
from ndctl.rank.checkpoint_files import newest_complete as newest_folder
from orchestrator.contract.codec import decode
from orchestrator.contract.spec.model_spec import LoraSpec


class Made(Struct, frozen=True, order=True):
    """When a checkpoint in memory was made. Those of two attempts never mix, even if both are of
    the same step."""

    step: int
    attempt: int


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


def trained(folder: Path) -> Trained | None:
    """What the checkpoint was made with; None if its marker does not say."""
    try:
        found: Trained = decode(Trained, read_marker(folder)["trained"])
    except (OSError, ValueError, KeyError):  # made by a user's script, or deleted meanwhile
        return None
    return found


def newest_complete(
    checkpoints: Path, damaged: Mapping[str, str] = NONE
) -> tuple[Path | None, tuple[SkippedCheckpoint, ...]]:
    """The newest complete checkpoint, and the newer ones that are skipped, each with its reason.

    `damaged` has checkpoints whose files were read and found wrong, each with its reason.
    """
    folder, skipped = newest_folder(checkpoints, damaged)
    return folder, tuple(SkippedCheckpoint(name, why) for name, why in skipped)
