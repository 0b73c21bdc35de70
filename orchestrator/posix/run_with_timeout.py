"""Work that may hang in the kernel, as on storage that does not answer or in a driver.

It is waited for so long and no longer. Its thread is left to itself, one of its own rather than of
a pool: what hangs takes no worker from others, and keeps no process from ending.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Any, TypeVar, TypeVarTuple

T = TypeVar("T")
Args = TypeVarTuple("Args")


async def within(seconds: float | None, work: Callable[[*Args], T], *args: *Args) -> T:
    """What `work` returns or raises; TimeoutError where that takes longer. None: for ever."""
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
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            loop.call_soon_threadsafe(tell, *came)

    threading.Thread(target=run, name=getattr(work, "__name__", "work"), daemon=True).start()
    return await asyncio.wait_for(done, seconds)


class Limit:
    """Seconds for several pieces of work, one after the other."""

    def __init__(self, seconds: float) -> None:
        self.until = asyncio.get_running_loop().time() + seconds

    @property
    def left_s(self) -> float:
        return max(0.0, self.until - asyncio.get_running_loop().time())

    async def within(self, work: Callable[[*Args], T], *args: *Args) -> T:
        """Raises TimeoutError."""
        return await within(self.left_s, work, *args)
