"""Reads secrets that a spec names: `file:PATH` or `env:VARIABLE`."""

from collections.abc import Mapping
from pathlib import Path


class NoSecret(Exception):
    """The file or the variable has no secret. The text says which, never the secret."""


def secret_of(ref: str, environ: Mapping[str, str]) -> str:
    """May block on storage. Raises NoSecret."""
    kind, _, name = ref.partition(":")
    if kind == "env":
        if not environ.get(name):
            raise NoSecret(f"the environment variable {name} is not set")
        return environ[name]
    try:
        text = Path(name).expanduser().read_text().strip()
    except (OSError, ValueError) as exc:
        why = exc.strerror if isinstance(exc, OSError) else "not text"
        raise NoSecret(f"{name} cannot be read: {why}") from exc
    if not text:
        raise NoSecret(f"{name} is empty")
    return text
