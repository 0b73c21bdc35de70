"""`leader.json`: where the leader of a launch listens; at the end, that the job is over."""

import json
from collections.abc import Mapping
from typing import Any

from msgspec import Struct
from msgspec.structs import asdict

from ndctl.rank.regular_file import read_regular
from orchestrator.contract.files.atomic_write import write_whole
from orchestrator.contract.files.run_dir import RunDir
from orchestrator.contract.read_json import read_json


class Term(Struct, frozen=True):
    """Identifies the run of a job to which a leader and its agents belong."""

    launch: int
    """Number of the submission."""
    restarts: int = 0
    """How often the scheduler has restarted it. Files of an earlier restart are ignored."""


def announce(run_dir: RunDir, term: Term, address: str, port: int, name: str = "") -> None:
    """Write where the leader of `term` listens. `name` is its host's name, if names resolve."""
    _write(run_dir, {**asdict(term), "address": address, "port": port, "name": name})


def announce_end(run_dir: RunDir, term: Term) -> None:
    """Write that the job is over, so that agents that start late do not look for a leader."""
    _write(run_dir, {**asdict(term), "over": True})


def _write(run_dir: RunDir, body: Mapping[str, object]) -> None:
    write_whole(run_dir.leader, json.dumps(body).encode())


def leader_of(run_dir: RunDir, term: Term) -> dict[str, Any]:
    """What the leader of `term` wrote: `address`, `port`, `name`, or `over`; empty before that."""
    try:
        leader = read_json(read_regular(run_dir.leader))
    except (OSError, ValueError):
        return {}
    ours = isinstance(leader, dict) and leader.items() >= asdict(term).items()
    return leader if ours else {}
