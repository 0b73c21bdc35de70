"""`fence.json`: which leader leads a job, and which attempt may write.

A host that was cut off from the network may return with a leader or ranks that know nothing of
later attempts. So every process reads this file before it writes a journal line, a checkpoint or a
metric. The leader writes it before it starts a new attempt. Ranks read it with `ndctl.rank.fence`.
"""

import json
from pathlib import Path

from msgspec import Struct
from msgspec.structs import asdict

from ndctl.rank.fence import GivenUp, read_fence_file
from orchestrator.contract.files.atomic_write import write_whole


class Fence(Struct, frozen=True, kw_only=True):
    leader: str
    """Random id of the leader."""
    attempt: int
    """Number of the newest attempt."""


def read_fence(path: Path) -> Fence | None:
    """None if there is no fence or it is damaged; then nothing forbids writing.

    Raises:
        OSError: it cannot be read at present, so it is unknown who may write.
    """
    found = read_fence_file(path)
    return None if found is None else Fence(leader=found[0], attempt=found[1])


def write_fence(path: Path, fence: Fence) -> None:
    """Returns when it is on disk. Raises OSError; the old fence is then still in place."""
    write_whole(path, json.dumps(asdict(fence)).encode(), durable=True)


def take_over(path: Path, leader: str) -> None:
    """Make a former leader that may still run stop writing. Raises OSError."""
    former = read_fence(path)
    write_fence(path, Fence(leader=leader, attempt=former.attempt if former else 0))


def check_leader(path: Path, leader: str) -> None:
    """Raises GivenUp if another leader has taken over from `leader`, and another OSError if that
    cannot be determined."""
    now = read_fence(path)
    if now is not None and now.leader != leader:
        raise GivenUp(f"another leader has taken over: {path} names it")
