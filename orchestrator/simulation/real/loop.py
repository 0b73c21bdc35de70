"""An asyncio event loop in virtual time: one for each simulated process, all on one timeline.

Nothing waits for real time, and no thread runs: `asyncio.sleep` sets a happening on the timeline.
"""

import asyncio
import contextvars
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, cast

from orchestrator.simulation.clock import Timeline

MOST_BURIED = 10_000
"""Callbacks that a process which is gone may still run, to take its coroutines apart."""


class Handle:
    """A callback that is due; asyncio cancels it, and asks when it is due."""

    __slots__ = ("args", "at", "callback", "context", "is_cancelled", "loop")

    def __init__(
        self,
        loop: "VirtualLoop",
        callback: Callable[..., object],
        args: tuple[Any, ...],
        context: contextvars.Context | None,
        at: float,
    ) -> None:
        self.loop, self.callback, self.args, self.at = loop, callback, args, at
        self.context = context or contextvars.copy_context()
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True

    def cancelled(self) -> bool:
        return self.is_cancelled

    def when(self) -> float:
        return self.at

    def run(self) -> None:
        if self.is_cancelled:
            return
        loop = self.loop
        if loop.is_dead and not loop.buries:
            loop.grave.append(self)  # its process is gone: nothing of it happens any more
            return
        asyncio._set_running_loop(cast(Any, loop))
        try:
            self.context.run(self.callback, *self.args)
        finally:
            asyncio._set_running_loop(None)


class VirtualLoop:
    """As much of an `asyncio.AbstractEventLoop` as tasks, timers and queues use."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        self.is_dead = self.buries = False
        self.grave: deque[Handle] = deque()
        self.tasks: set[asyncio.Task[Any]] = set()
        self.defects: list[BaseException] = []
        """What a task raised that nobody heard of."""

    def time(self) -> float:
        return self.timeline.now

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def call_soon(
        self,
        callback: Callable[..., object],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> Handle:
        handle = Handle(self, callback, args, context, self.timeline.now)
        if self.is_dead:
            self.grave.append(handle)
        else:
            self.timeline.soon(handle.run)
        return handle

    def call_later(
        self,
        delay: float,
        callback: Callable[..., object],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> Handle:
        return self.call_at(self.timeline.now + delay, callback, *args, context=context)

    def call_at(
        self,
        when: float,
        callback: Callable[..., object],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> Handle:
        handle = Handle(self, callback, args, context, when)
        if self.is_dead:
            self.grave.append(handle)
        else:
            self.timeline.after(max(0.0, when - self.timeline.now), handle.run)
        return handle

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=cast(Any, self))

    def create_task(
        self,
        coro: Coroutine[Any, Any, Any],
        *,
        name: str | None = None,
        context: contextvars.Context | None = None,
    ) -> asyncio.Task[Any]:
        task = asyncio.Task(coro, loop=cast(Any, self), name=name, context=context)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        exception = context.get("exception")
        if exception is not None and not self.is_dead:
            self.defects.append(exception)

    def kill(self) -> None:
        """Its process is gone: nothing that waits goes on."""
        self.is_dead = True

    def bury(self) -> None:
        """Take apart what a process that is gone left behind; called at the end of a simulation."""
        self.is_dead = self.buries = True
        for task in list(self.tasks):
            task.cancel()
        for _ in range(MOST_BURIED):
            if not self.grave:
                break
            self.grave.popleft().run()
