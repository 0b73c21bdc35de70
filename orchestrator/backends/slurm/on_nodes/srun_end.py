"""Record how srun ended, for the leader of the next run.

If srun is killed, all agents of the run end. Without this record, the next leader would find an
attempt without an end and assume that the host of the former leader was lost.
"""

import contextlib
import json
import logging
import re
import signal
from collections.abc import Mapping, Sequence
from itertools import takewhile
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
CANCELLED = re.compile(r"STEP (\S+) ON \S+ CANCELLED AT \S+( DUE TO .+?)? \*\*\*")
"""Line in the output of a step that scancel or Slurm itself ended; the latter adds `DUE TO` and a
reason. Slurm writes the same line if srun was killed."""
# srun counts nodes from 0.
GAVE_UP = re.compile(r"Cannot communicate with node|missing step on node")
LIVED = re.compile(r"Job step aborted|tasks? [\d,-]+: ")
"""srun writes such a line when its tasks end, so it was not killed before them."""


def write_down(path: Path, host: str, code: int, at: float, step: str = "") -> None:
    """Write the record. A failure only logs, because the next leader can do without it.

    Args:
        step: how the step of the agents ended, from `step_end`.
    """
    body = {"code": code, "host": host, "at": at, "step": step}
    try:
        write_whole(path, json.dumps(body).encode())
    except OSError as exc:
        log.warning("failed to record the end of srun: %s", exc)


def last_errors(batch_output: Path) -> str:
    """The last errors of srun and their file, as the end of a sentence; empty if there are none.

    Args:
        batch_output: the output of the batch script. It also has lines of earlier allocations.
    """
    errors = [line for line in _last_lines(batch_output) if line.startswith("srun: ")]
    said = "; ".join(dict.fromkeys(errors[-MOST_ERRORS:]))
    return f": {said} (from {batch_output})" if said else ""


def step_end(
    run_dir: Path, launch: int, environ: Mapping[str, str], batch_output: Path | None = None
) -> str:
    """How the step of the agents ended, if srun lived until then; empty if that is not known.

    Args:
        environ: of a process in the same run of the job.
        batch_output: the output of the batch script, where its last lines are still those of srun;
            None: the usual file.
    """
    job, run = environ.get("SLURM_JOB_ID", ""), environ.get("SLURM_RESTART_COUNT", "0")
    folder = RunDir(run_dir).slurm / f"launch-{launch}"
    batch_output = batch_output or folder / f"{job}_batch.out"
    # If srun is killed, the shell says so in a line of its own, so then there are none.
    newest = takewhile(lambda line: line.startswith("srun: "), reversed(_last_lines(batch_output)))
    said = [*newest][::-1]
    if gave_up := [line for line in said if GAVE_UP.search(line)]:
        return f"srun lost a node and ended the step ({gave_up[0]}; srun counts nodes from 0)"
    if not any(LIVED.search(line) for line in said):
        return ""
    for path in sorted(folder.glob(f"{job}-{run}_*_log.err")):
        for line in _last_lines(path):
            if found := CANCELLED.search(line):
                by = found[2] or " (by scancel or Slurm)"
                return f"step {found[1]} was cancelled{by}"
    return ""


def _last_lines(path: Path) -> Sequence[str]:
    try:
        with open_regular(path) as file:
            file.seek(max(0, path.stat().st_size - READ_BYTES))
            return file.read().decode(errors="replace").splitlines()
    except OSError:  # the text went to a pipe, or to a folder that is not in the container
        return ()


def breakdown(launch: LaunchPlan, restarts: int) -> Breakdown | None:
    """How a signal ended srun in the run after `restarts` requeues; None: not so, or unknown."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        body = read_json(read_regular(note(Path(launch.run_dir), launch.launch, restarts)))
        code, host, at = int(body["code"]), str(body["host"]), float(body["at"])
        if code in BY_SIGNAL:
            step = str(body.get("step", ""))
            return Breakdown(what=step or _words(code, host, len(launch.hosts)), at=at)
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
