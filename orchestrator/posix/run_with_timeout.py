"""Runs calls that may hang in the kernel, for example on unavailable storage or in a driver.

The caller waits for a limited time. The call runs in a thread of its own and not in a pool: if it
hangs, it blocks no worker of a pool and does not keep the process from exiting.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Any, TypeVar, TypeVarTuple

T = TypeVar("T")
Args = TypeVarTuple("Args")


async def within(seconds: float | None, work: Callable[[*Args], T], *args: *Args) -> T:
    """The result of `work`, or what it raises; TimeoutError after `seconds`. None: no limit."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def tell(how: Callable[[Any], None], what: Any) -> None:
        if not done.done():
            how(what)

    def run() -> None:
        try:
            came: tuple[Callable[[Any], None], Any] = (done.set_result, work(*args))
        except Exception as exc:  # noqa: BLE001 - raised where it is awaited
            came = (done.set_exception, exc)
        with contextlib.suppress(RuntimeError):  # the loop is closed: nothing waits
            loop.call_soon_threadsafe(tell, *came)

    threading.Thread(target=run, name=getattr(work, "__name__", "work"), daemon=True).start()
    return await asyncio.wait_for(done, seconds)


class Limit:
    """A time limit shared by several calls, one after the other."""

    def __init__(self, seconds: float) -> None:
        self.until = asyncio.get_running_loop().time() + seconds

    @property
    def left_s(self) -> float:
        return max(0.0, self.until - asyncio.get_running_loop().time())

    async def within(self, work: Callable[[*Args], T], *args: *Args) -> T:
        """Raises TimeoutError."""
        return await within(self.left_s, work, *args)


class Lane:
    """Runs one call at a time. A call that hangs keeps the lane, and further callers give up."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    @property
    def is_free(self) -> bool:
        return not self._lock.locked()

    async def run(self, seconds: float, work: Callable[[*Args], T], *args: *Args) -> T:
        """The result of `work`, or what it raises; TimeoutError after `seconds`."""
        limit = Limit(seconds)
        await asyncio.wait_for(self._lock.acquire(), limit.left_s)
        task = asyncio.create_task(within(None, work, *args))
        task.add_done_callback(self._ended)
        return await asyncio.wait_for(asyncio.shield(task), limit.left_s)

    def _ended(self, task: asyncio.Task[T]) -> None:
        self._lock.release()
        look_at_error(task)


def look_at_error(task: asyncio.Task[T]) -> None:
    """The caller may have given up, and asyncio complains of errors that were not looked at."""
    if not task.cancelled():
        task.exception()
