"""Record how srun ended, for the leader of the next run.

If srun is killed, all agents of the run end. Without this record, the next leader would find an
attempt without an end and assume that the host of the former leader was lost.
"""

import contextlib
import json
import logging
import signal
from pathlib import Path

from ndctl.rank.regular_file import open_regular, read_regular
from orchestrator.contract.files.atomic_write import write_whole
from orchestrator.contract.files.run_dir import RunDir
from orchestrator.contract.launch import Breakdown, LaunchPlan
from orchestrator.contract.read_json import read_json

log = logging.getLogger(__name__)

BY_SIGNAL = range(129, 193)
"""Exit codes of shells and srun for a program that a signal ended. Agents use other exit codes
(`contract/files/exit_codes.py`)."""
READ_BYTES = 65536
MOST_ERRORS = 3


def write_down(path: Path, host: str, code: int, at: float) -> None:
    """Write the record. A failure only logs, because the next leader can do without it."""
    body = {"code": code, "host": host, "at": at}
    try:
        write_whole(path, json.dumps(body).encode())
    except OSError as exc:
        log.warning("failed to record the end of srun: %s", exc)


def last_errors(batch_output: Path) -> str:
    """The last errors of srun and their file, as the end of a sentence; empty if there are none.

    Args:
        batch_output: the output of the batch script. It also has lines of earlier allocations.
    """
    try:
        with open_regular(batch_output) as file:
            file.seek(max(0, batch_output.stat().st_size - READ_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:  # srun's errors went to a pipe, or to a folder that is not in the container
        return ""
    errors = [line for line in lines if line.startswith("srun: ")][-MOST_ERRORS:]
    return f": {'; '.join(dict.fromkeys(errors))} (from {batch_output})" if errors else ""


def breakdown(launch: LaunchPlan, restarts: int) -> Breakdown | None:
    """How a signal ended srun in the run after `restarts` requeues; None: not so, or unknown."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        body = read_json(read_regular(note(Path(launch.run_dir), launch.launch, restarts)))
        code, host, at = int(body["code"]), str(body["host"]), float(body["at"])
        if code in BY_SIGNAL:
            return Breakdown(what=_words(code, host, len(launch.hosts)), at=at)
    return None


def _words(code: int, host: str, hosts: int) -> str:
    """srun also exits with the code of a killed task. With several tasks, all end together only if
    srun itself was killed; with one task it is unclear which of the two was killed."""
    by = _signal(code - 128)
    if hosts == 1:
        return f"{by} ended srun on {host} or its only agent (code {code})"
    return f"{by} ended srun on {host} and with it all agents (code {code})"


def _signal(number: int) -> str:
    with contextlib.suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"


def note(run_dir: Path, launch: int, restarts: int) -> Path:
    """The record file of a run."""
    return RunDir(run_dir).slurm / f"launch-{launch}" / f"srun-{restarts}.json"
