"""`leader.json`: where the leader of a launch listens, and in the end that the job is over."""

import json
from collections.abc import Mapping
from typing import Any

from orchestrator.contract.rundir import RunDir


def announce(run_dir: RunDir, launch: int, address: str, port: int) -> None:
    """Say where the leader of `launch` listens."""
    _write(run_dir, {"launch": launch, "address": address, "port": port})


def announce_end(run_dir: RunDir, launch: int) -> None:
    """Agents that have not come yet need not look for a leader any more."""
    _write(run_dir, {"launch": launch, "over": True})


def _write(run_dir: RunDir, body: Mapping[str, object]) -> None:
    fresh = run_dir.leader.with_suffix(".new")
    fresh.write_text(json.dumps(body))
    fresh.replace(run_dir.leader)


def leader_of(run_dir: RunDir, launch: int) -> dict[str, Any]:
    """What the leader of `launch` said: `address` and `port`, or `over`; empty before it has."""
    try:
        leader = json.loads(run_dir.leader.read_text())
    except (OSError, ValueError):
        return {}
    ours = isinstance(leader, dict) and leader.get("launch") == launch
    return leader if ours else {}
