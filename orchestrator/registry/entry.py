"""The file that registers one job.

It says where the run directory is, and nothing that only the job's owner may know: no command line,
no settings, no text that a program printed.
"""

from pathlib import Path

import msgspec
from msgspec import Struct

from orchestrator.contract.times import check_time

VERSION = 1
MOST_BYTES = 256 << 10
"""Largest file that is read. ndctl writes 1 KB, and the names of the job's hosts."""


class Entry(Struct, frozen=True, kw_only=True):
    v: int = VERSION
    name: str
    run_dir: str
    """Absolute path. For a job in a Kubernetes cluster: of its copy on the submitting machine."""
    user: str
    machine: str
    """Name of the machine that registered the job. Other machines may not see the folder."""
    backend: str
    at: float
    """When the job was submitted."""
    hosts: int = 0
    gpus: int = 0
    """Devices of all hosts, as requested."""
    report: msgspec.Raw = msgspec.Raw(b"null")
    """In the shared index: the leader's last summary of the job, a `JobSummary` in JSON."""


def to_bytes(entry: Entry) -> bytes:
    return msgspec.json.encode(entry) + b"\n"


def from_bytes(data: bytes) -> Entry:
    """Raises ValueError. Keys that a newer ndctl added are ignored."""
    try:
        entry = msgspec.json.decode(data, type=Entry)
    except RecursionError as exc:
        raise ValueError("it is nested too deep") from exc
    check_time(entry.at)
    if not Path(entry.run_dir).is_absolute() or "\0" in entry.run_dir:
        raise ValueError("its run_dir is no absolute path")
    if Path(entry.run_dir).name != entry.name:
        raise ValueError("its run_dir does not end with its name")
    return entry
