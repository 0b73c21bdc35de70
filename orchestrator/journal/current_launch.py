"""`launch.json`: the launch that counts, as the newest JobSubmitted of the journal has it.

Every agent asks for it before it touches anything, all hosts of a job at the same time, and a
journal of weeks has hundreds of megabytes. The journal stays the state: the leader, which folds it
anyway, goes by that alone.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from orchestrator.contract.codec import Invalid, decode, encode
from orchestrator.contract.files.atomic_write import write_whole
from orchestrator.contract.files.run_dir import RunDir
from orchestrator.contract.launch import LaunchPlan
from orchestrator.contract.messages.events import JobSubmitted
from orchestrator.contract.read_json import read_json
from orchestrator.journal.journal import Tail


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    backend: str
    launch: LaunchPlan


def note(run_dir: RunDir, job: JobSubmitted) -> None:
    """Before the journal has it: an agent of a launch before is then rather sent away."""
    body = encode(Launched(backend=job.backend, launch=job.launch))
    write_whole(run_dir.launch, json.dumps(body).encode())


def counting(run_dir: RunDir) -> Launched | None:
    """None before there is any. Raises OSError."""
    try:
        noted: Launched = decode(Launched, read_json(run_dir.launch.read_text()))
    except (FileNotFoundError, ValueError, Invalid):  # of an ndctl that wrote none, or damaged
        return _journalled(run_dir)
    return noted


def counting_spec(run_dir: RunDir) -> Path:
    """The spec of the launch that counts, whether or not it has come to train."""
    launched = counting(run_dir)
    own = run_dir.spec if launched is None else run_dir.spec_of(launched.launch.launch)
    return own if own.exists() else run_dir.spec


def _journalled(run_dir: RunDir) -> Launched | None:
    found = None
    for entry in Tail(run_dir.journal).each():
        if isinstance(entry.event, JobSubmitted):
            found = Launched(backend=entry.event.backend, launch=entry.event.launch)
    return found
