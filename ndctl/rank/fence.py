"""Prevents a process of an old attempt from writing after a newer attempt has started.

The leader writes `fence.json` before it starts an attempt. A host that was cut off from the network
may return with ranks that know nothing of it. So a rank reads the file before each write.
"""

import errno
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

STALE_TRIES = 3

Admit = Callable[[], None]
"""Called before each write. Raises GivenUp if a later attempt has started, or another OSError if
the fence file cannot be read."""


class GivenUp(OSError):
    """Another leader or attempt has taken over, so this process must not write any more."""


def admit_all() -> None:
    """Allows every write."""


def admit_attempt(path: Path, attempt: int) -> Admit:
    return partial(check_attempt, path, attempt)


def check_attempt(path: Path, attempt: int) -> None:
    """Raises GivenUp if a later attempt than `attempt` has started.

    Raises another OSError if that cannot be determined. An attempt starts only after its fence was
    written, so without a fence the run directory was moved or removed, and a new directory of this
    name may belong to another job.
    """
    now = read_fence_file(path)
    if now is None and not path.exists():
        raise FileNotFoundError(errno.ENOENT, "the run directory has lost its fence", str(path))
    if now is not None and now[1] > attempt:
        raise GivenUp(f"attempt {attempt} was given up: attempt {now[1]} has begun")


def read_fence_file(path: Path) -> tuple[str, int] | None:
    """The random id of the leader, and the number of the newest attempt. None if there is no fence
    or it is damaged; then nothing forbids writing.

    The file is replaced atomically, so a damaged one stays damaged. If it kept every process from
    writing, the job would end. The next attempt writes a new one.

    Raises:
        OSError: it cannot be read at present, so it is unknown who may write.
    """
    try:
        body = json.loads(_text(path))
        return str(body["leader"]), int(body["attempt"])
    except (FileNotFoundError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
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
