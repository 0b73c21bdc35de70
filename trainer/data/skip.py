"""Reads the windows of data to skip from the environment."""

from orchestrator.contract.files.env import SKIP
from orchestrator.contract.skipped_batches import Window, from_text
from orchestrator.errors import TrainingError


def read_skip(text: str) -> tuple[Window, ...]:
    """Raises TrainingError."""
    try:
        return from_text(text, SKIP)
    except ValueError as exc:
        raise TrainingError(
            f"failed to read {SKIP}: {exc}",
            fix='unset it, or give a JSON list such as [{"first": 41, "last": 52}]',
        ) from exc
