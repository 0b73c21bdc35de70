"""Run a shell hook of the spec on one host, with a timeout and a log."""

import os
import signal
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Literal

KILL_S = 5.0
"""Seconds for a killed hook to exit. One that waits in the kernel is left to Slurm."""
LAST_BYTES = 2_000
LAST_LINES = 5
"""Lines of the output in the error."""


def run_hook(
    which: Literal["before", "after"],
    line: str,
    environ: Mapping[str, str],
    log: Path,
    limit_s: float,
) -> str:
    """Run a hook. Returns the reason of a failure with the end of its output; empty: success."""
    try:
        with log.open("ab") as out:
            out.write(f"# {which}: {line}\n".encode())
            out.flush()
            began = out.tell()
            code = _run(line, environ, out, limit_s)
    except OSError as exc:  # a full disk, or no bash
        return f"failed to start: {exc}"
    if code == 0:
        return ""
    ended = f"timed out after {limit_s:g} s" if code is None else _words(code)
    said = _end_of(log, began)
    return f"{ended}; output: {said}" if said else f"{ended} without output"


def _run(line: str, environ: Mapping[str, str], out: BinaryIO, limit_s: float) -> int | None:
    """The exit code; None: it timed out and was killed with its process group."""
    process = subprocess.Popen(
        ["bash", "-c", line],
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=subprocess.STDOUT,
        env=dict(environ),
        start_new_session=True,
    )
    try:
        return process.wait(timeout=limit_s)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=KILL_S)
        return None


def _words(code: int) -> str:
    return f"exited with code {code}" if code > 0 else f"was killed by {signal.Signals(-code).name}"


def _end_of(log: Path, began: int) -> str:
    with log.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(began, size - LAST_BYTES))
        text = file.read().decode(errors="replace")
    return " | ".join([line for line in text.splitlines() if line.strip()][-LAST_LINES:])
