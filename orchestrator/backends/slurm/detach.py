"""Start a command in the background."""

import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from orchestrator.errors import BackendError

Detached = subprocess.Popen[bytes]


def start_beside(argv: Sequence[str], environ: Mapping[str, str], log: Path) -> Detached:
    """Start a command in its own process group, so that Ctrl-C does not reach it. Raises
    BackendError."""
    try:
        with log.open("ab") as out:
            return subprocess.Popen(
                list(argv),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=dict(environ),
                process_group=0,
            )
    except OSError as exc:
        raise BackendError(f"failed to start {argv[0]}: {exc}") from exc


def start(argv: Sequence[str], environ: Mapping[str, str], log: Path, early_s: float) -> Detached:
    """Start a command that outlives this process. Raises BackendError if it cannot be started or
    fails within `early_s` seconds."""
    program = shutil.which(argv[0], path=environ.get("PATH"))
    try:
        with log.open("ab") as out:
            process = subprocess.Popen(
                [program or argv[0], *argv[1:]],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=dict(environ),
                start_new_session=True,
            )
    except OSError as exc:
        raise BackendError(f"failed to start {argv[0]}: {exc}") from exc
    try:
        code = process.wait(timeout=early_s)
    except subprocess.TimeoutExpired:
        return process
    if code != 0:
        said = " ".join(log.read_text(errors="replace").split("\n")[-3:]).strip()
        raise BackendError(f"{argv[0]} failed with code {code}: {said}")
    return process
