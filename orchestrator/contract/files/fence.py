"""`fence.json`: which leader leads a job, and which attempt may write.

A host that was cut off from the network may return with a leader or ranks that know nothing of
later attempts. So every process reads this file before it writes a journal line, a checkpoint or a
metric. The leader writes it before it starts a new attempt.
"""

import errno
import json
from pathlib import Path

from msgspec import Struct
from msgspec.structs import asdict

from orchestrator.contract.files.atomic_write import write_whole
from orchestrator.contract.read_json import read_json

STALE_TRIES = 3


class Fence(Struct, frozen=True, kw_only=True):
    leader: str
    """Random id of the leader."""
    attempt: int
    """Number of the newest attempt."""


class GivenUp(OSError):
    """Another leader or attempt has taken over, so this process must not write any more."""


def read_fence(path: Path) -> Fence | None:
    """None if there is no fence or it is damaged; then nothing forbids writing.

    The file is replaced atomically, so a damaged one stays damaged. If it kept every process from
    writing, the job would end. The next attempt writes a new one.

    Raises:
        OSError: it cannot be read at present, so it is unknown who may write.
    """
    try:
        body = read_json(_text(path))
        return Fence(leader=str(body["leader"]), attempt=int(body["attempt"]))
    except (FileNotFoundError, ValueError, KeyError, TypeError, OverflowError):
        return None


def _text(path: Path) -> str:
    # On NFS, a file that is replaced while it is opened may give a stale handle. Opening it again
    # gives the new file.
    for _ in range(STALE_TRIES - 1):
        try:
            return path.read_text()
        except OSError as exc:
            if exc.errno != errno.ESTALE:
                raise
    return path.read_text()


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


def check_attempt(path: Path, attempt: int) -> None:
    """Raises GivenUp if a later attempt than `attempt` has started.

    Raises another OSError if that cannot be determined. An attempt starts only after its fence was
    written, so without a fence the run directory was moved or removed, and a new directory of this
    name may belong to another job.
    """
    now = read_fence(path)
    if now is None and not path.exists():
        raise FileNotFoundError(errno.ENOENT, "the run directory has lost its fence", str(path))
    if now is not None and now.attempt > attempt:
        raise GivenUp(f"attempt {attempt} was given up: attempt {now.attempt} has begun")
