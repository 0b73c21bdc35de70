"""`launch.json`: the current launch, which is the newest JobSubmitted of the journal.

Every agent reads it before it does anything else, on all hosts of a job at the same time. The
journal of a job of weeks has hundreds of megabytes, so agents do not read that. The leader folds
the journal anyway and uses only the journal.
"""

import json
from pathlib import Path

from msgspec import Struct

from ndctl.rank.regular_file import read_regular
from orchestrator.contract.codec import Invalid, decode, encode
from orchestrator.contract.files.atomic_write import write_whole
from orchestrator.contract.files.run_dir import RunDir
from orchestrator.contract.launch import LaunchPlan
from orchestrator.contract.messages.events import JobSubmitted
from orchestrator.contract.read_json import read_json
from orchestrator.contract.spec.run_spec import RunSpec
from orchestrator.journal.journal import Tail


class Launched(Struct, frozen=True, kw_only=True):
    backend: str
    launch: LaunchPlan
    run: RunSpec | None = None
    """The user's own program."""


def write_current_launch(run_dir: RunDir, job: JobSubmitted) -> None:
    """Call it before the journal is written. If the caller dies in between, an agent of the
    previous launch is rejected, which is safe; the other order would let it touch the new job."""
    body = encode(Launched(backend=job.backend, launch=job.launch, run=job.run))
    write_whole(run_dir.launch, json.dumps(body).encode())


def current_launch(run_dir: RunDir) -> Launched | None:
    """None if there is no launch yet. Raises OSError."""
    try:
        noted: Launched = decode(Launched, read_json(read_regular(run_dir.launch)))
    except (FileNotFoundError, ValueError, Invalid):  # an older ndctl wrote none, or it is damaged
        return _journalled(run_dir)
    return noted


def current_spec(run_dir: RunDir) -> Path:
    """The spec of the current launch, even if that has not started to train."""
    launched = current_launch(run_dir)
    own = run_dir.spec if launched is None else run_dir.spec_of(launched.launch.launch)
    # An older ndctl wrote only `spec.yaml`.
    return own if own.exists() else run_dir.spec


def _journalled(run_dir: RunDir) -> Launched | None:
    found = None
    for entry in Tail(run_dir.journal).each():
        if isinstance(entry.event, JobSubmitted):
            job = entry.event
            found = Launched(backend=job.backend, launch=job.launch, run=job.run)
    return found
