"""The file that registers one job.

It says where the run directory is, and nothing that only the job's owner may know: no command line,
no settings, no text that a program printed.
"""

import json
from pathlib import Path

from msgspec import Struct

from orchestrator.contract.codec import Invalid, decode, encode
from orchestrator.contract.read_json import read_json
from orchestrator.contract.times import check_time

VERSION = 1
MOST_BYTES = 16 << 10
"""Largest file that is read; ndctl writes less than 1 KB."""


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


def to_bytes(entry: Entry) -> bytes:
    return json.dumps(encode(entry), separators=(",", ":")).encode() + b"\n"


def from_bytes(data: bytes) -> Entry:
    """Raises ValueError. Keys that a newer ndctl added are ignored."""
    body = read_json(data, most=MOST_BYTES)
    if not isinstance(body, dict):
        raise ValueError("it is not an object")
    known = {key: value for key, value in body.items() if key in Entry.__struct_fields__}
    try:
        entry: Entry = decode(Entry, known)
    except Invalid as exc:
        raise ValueError(str(exc).partition("\n")[0]) from exc
    check_time(entry.at)
    if not Path(entry.run_dir).is_absolute() or "\0" in entry.run_dir:
        raise ValueError("its run_dir is no absolute path")
    if Path(entry.run_dir).name != entry.name:
        raise ValueError("its run_dir does not end with its name")
    return entry
