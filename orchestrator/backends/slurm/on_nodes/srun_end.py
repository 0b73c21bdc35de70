"""What is known of an srun that ended, and with it all agents of a run: for the next run's leader.

Without it that leader finds an attempt without an end, and takes the host of the leader before it
for the one that was lost.
"""

import contextlib
import json
import logging
import signal
from pathlib import Path

from orchestrator.contract.files.atomic_write import write_whole
from orchestrator.contract.files.run_dir import RunDir
from orchestrator.contract.launch import Breakdown, LaunchPlan
from orchestrator.contract.read_json import read_json

log = logging.getLogger(__name__)

BY_SIGNAL = range(129, 193)
"""Exit codes of a program that a signal ended, as shells and srun tell them. Those of agents that
say how they left are others (`contract/files/exit_codes.py`)."""


def write_down(path: Path, host: str, code: int, at: float) -> None:
    """Where there is room for it: without it, the next leader only knows less."""
    body = {"code": code, "host": host, "at": at}
    try:
        write_whole(path, json.dumps(body).encode())
    except OSError as exc:
        log.warning("how srun ended cannot be written down: %s", exc)


def breakdown(launch: LaunchPlan, restarts: int) -> Breakdown | None:
    """How srun broke in the run that began after so many restarts; None where it did not, or that
    is not known."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        body = read_json(note(Path(launch.run_dir), launch.launch, restarts).read_text())
        code, host, at = int(body["code"]), str(body["host"]), float(body["at"])
        if code in BY_SIGNAL:
            return Breakdown(what=_words(code, host, len(launch.hosts)), at=at)
    return None


def _words(code: int, host: str, hosts: int) -> str:
    """srun has the code of a task that was killed, too: of several tasks all are gone at once only
    with srun itself, a single one may have been killed alone."""
    by = _signal(code - 128)
    if hosts == 1:
        return f"{by} ended srun on {host}, or the one agent that it had started (code {code})"
    return f"{by} ended srun on {host}, and with it all agents (code {code})"


def _signal(number: int) -> str:
    with contextlib.suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"


def note(run_dir: Path, launch: int, restarts: int) -> Path:
    """The file of a run."""
    return RunDir(run_dir).slurm / f"launch-{launch}" / f"srun-{restarts}.json"
