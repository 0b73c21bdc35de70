"""Captured output of Slurm, by version; `tests/captured/slurm/README.md` has the sources."""

from pathlib import Path

CAPTURED = Path(__file__).parents[2] / "captured" / "slurm"


def captured(name: str) -> str:
    return (CAPTURED / name).read_text()
