"""transformers' `get_last_checkpoint`, which a script resumes from, without torn checkpoints.

Imports nothing of transformers: `transformers.trainer_utils` is changed while transformers is being
imported.
"""

import os
import re
import sys
from pathlib import Path
from types import ModuleType

from trainer.program.frameworks.folder_marks import torn

CHECKPOINT = re.compile(r"checkpoint-(\d+)")

skipped: list[tuple[str, str]] = []
"""Torn checkpoints that the last call skipped: name and reason."""


def skip_torn(module: ModuleType) -> None:
    """Make `get_last_checkpoint` of `module` give the newest checkpoint that is not torn."""
    module.get_last_checkpoint = get_last_checkpoint  # type: ignore[attr-defined]


def get_last_checkpoint(folder: str | os.PathLike[str]) -> str | None:
    """As transformers' own, but without torn ones."""
    found = [
        (int(match[1]), path)
        for path in Path(folder).iterdir()
        if (match := CHECKPOINT.fullmatch(path.name)) and path.is_dir()
    ]
    skipped.clear()
    for step, path in sorted(found, reverse=True):
        why = torn(path)
        if not why:
            return str(path)
        skipped.append((path.name, why))
        sys.stderr.write(f"ndctl: {path.name} (step {step}) is skipped: {why}\n")
    return None
