"""Retries storage operations, so that full or unavailable storage does not end an agent."""

import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from ndctl.rank.fence import GivenUp
from orchestrator.seams import Clock, Worker

log = logging.getLogger(__name__)

RETRY_S = 1.0
LASTING = (GivenUp, PermissionError, FileNotFoundError, NotADirectoryError)
"""Errors that do not go away by waiting."""

TAKE_OVER_S = 120.0
"""Seconds in which a former leader that was cut off notices that it was replaced and releases the
journal, or in which a file server takes the lock from a dead host."""

T = TypeVar("T")


def retry_io(work: Callable[[], T], what: str, clock: Clock) -> T:
    """The result of `work`, repeated until storage works. An error in `LASTING` is raised at
    once."""
    while True:
        try:
            return work()
        except LASTING:
            raise
        except OSError as exc:
            log.error("%s, trying again: %s", what, exc)
            clock.sleep(RETRY_S)


async def retry_io_in(
    worker: Worker, work: Callable[[], T], what: str, pause: Callable[[float], Awaitable[None]]
) -> T:
    """The same on an event loop: the worker runs `work`, `pause` waits between two tries."""
    while True:
        try:
            return await worker(work)
        except LASTING:
            raise
        except OSError as exc:
            log.error("%s, trying again: %s", what, exc)
            await pause(RETRY_S)
