"""`fence.json`: who leads a job now, and which attempt may write.

A host that was cut off from the network may come back with a leader or ranks that know nothing of
the attempts made since. Whoever is about to make a mark (a journal line, a checkpoint, a metric)
looks here first; the leader writes it before it tells anybody of a new attempt.
"""

import errno
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from orchestrator.contract.files.atomic_write import write_whole
from orchestrator.contract.read_json import read_json

STALE_TRIES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Fence:
    leader: str
    """Drawn by each leader at its start."""
    attempt: int
    """The newest one."""


class GivenUp(OSError):
    """Others have taken over: leave everything as it is."""


def read_fence(path: Path) -> Fence | None:
    """None where there is none, or what is there is none: nothing is known against anybody.

    It is written whole or not at all, so one that makes no sense was damaged and says nothing for
    good: to keep everybody out would end the job, and the next attempt writes another.

    Raises:
        OSError: it cannot be read at present, so nobody knows who may write.
    """
    try:
        body = read_json(_text(path))
        return Fence(leader=str(body["leader"]), attempt=int(body["attempt"]))
    except (FileNotFoundError, ValueError, KeyError, TypeError, OverflowError):
        return None


def _text(path: Path) -> str:
    """On NFS whoever opens a file while another takes its place may get a handle of what is gone:
    opened again, it is the new one."""
    for _ in range(STALE_TRIES - 1):
        try:
            return path.read_text()
        except OSError as exc:
            if exc.errno != errno.ESTALE:
                raise
    return path.read_text()


def write_fence(path: Path, fence: Fence) -> None:
    """On disk when this returns. Raises OSError, with the former one still in place."""
    write_whole(path, json.dumps(asdict(fence)).encode(), durable=True)


def take_over(path: Path, leader: str) -> None:
    """Tell a former leader that may still live that its time is over. Raises OSError."""
    former = read_fence(path)
    write_fence(path, Fence(leader=leader, attempt=former.attempt if former else 0))


def check_leader(path: Path, leader: str) -> None:
    """Raises GivenUp when another leader has taken over from `leader`, and another OSError when
    that cannot be told."""
    now = read_fence(path)
    if now is not None and now.leader != leader:
        raise GivenUp(f"another leader has taken over: {path} names it")


def check_attempt(path: Path, attempt: int) -> None:
    """Raises GivenUp when a later attempt than `attempt` has begun, and another OSError when that
    cannot be told: an attempt begins behind a fence, so where there is none the run directory was
    moved or removed, and whose the one is that stands there now is not known."""
    now = read_fence(path)
    if now is None and not path.exists():
        raise FileNotFoundError(errno.ENOENT, "the run directory has lost its fence", str(path))
    if now is not None and now.attempt > attempt:
        raise GivenUp(f"attempt {attempt} was given up: attempt {now.attempt} has begun")
