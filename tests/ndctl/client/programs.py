"""Programs for tests: quick, and without torch."""

import os
from pathlib import Path

WORK = """#!/bin/sh
echo "rank $RANK of $WORLD_SIZE: $2"
trap 'exit 0' TERM
i=0
while [ $i -lt $1 ]; do sleep 0.1; i=$((i + 1)); done
exit ${3:-0}
"""
"""Arguments: tenths of a second to work, a word to print, and the exit code."""


def work(folder: Path, *args: int | str) -> list[int | str]:
    """What `ndctl.run` takes, for a program that is not Python."""
    return ["--no-python", write_work(folder), *args]


def write_work(folder: Path) -> str:
    """The path of the program."""
    path = folder / "work.sh"
    path.write_text(WORK)
    path.chmod(0o755)
    return os.fspath(path)


def write_script(folder: Path, text: str) -> Path:
    path = folder / "script.py"
    path.write_text(text)
    return path
