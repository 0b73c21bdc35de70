"""Storage that is full, or away for a while, ends no agent."""

import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from orchestrator.contract.files.fence import GivenUp
from orchestrator.seams import Clock, Worker

log = logging.getLogger(__name__)

RETRY_S = 1.0
LASTING = (GivenUp, PermissionError, FileNotFoundError, NotADirectoryError)
"""What does not pass by itself."""

TAKE_OVER_S = 120.0
"""For a former leader, cut off on its host, to see that it was replaced and to let go of the
journal, or for a file server to take the lock from a host that is gone."""

T = TypeVar("T")


def once_it_serves(work: Callable[[], T], what: str, clock: Clock) -> T:
    """What `work` returns when storage lets it. Raises at once an OSError that will not pass."""
    while True:
        try:
            return work()
        except LASTING:
            raise
        except OSError as exc:
            log.error("%s, trying again: %s", what, exc)
            clock.sleep(RETRY_S)


async def once_it_serves_in(
    worker: Worker, work: Callable[[], T], what: str, pause: Callable[[float], Awaitable[None]]
) -> T:
    """The same on an event loop: the worker does `work`, `pause` waits between two tries."""
    while True:
        try:
            return await worker(work)
        except LASTING:
            raise
        except OSError as exc:
            log.error("%s, trying again: %s", what, exc)
            await pause(RETRY_S)
