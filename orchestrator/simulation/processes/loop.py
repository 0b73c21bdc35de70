"""An asyncio event loop in virtual time. Each simulated process has one; all use one timeline.

No code waits for real time and no thread runs. `asyncio.sleep` adds a callback to the timeline.
"""

import asyncio
import contextvars
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, cast

from ndctl.rank.fence import GivenUp
from orchestrator.simulation.clock import Timeline

_set_running_loop = cast(Callable[[object], None], asyncio._set_running_loop)
MOST_ROUNDS = 30
"""Limit on the rounds that cancel the coroutines of ended processes."""


class Handle:
    """A scheduled callback, with the methods of `asyncio.TimerHandle` that asyncio calls."""

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
        if not (loop.runs or loop.is_cleaning_up):
            if loop.is_dead:
                loop.leftovers.append(self)  # the process has ended, so `cancel_leftovers` runs it
                return
            if loop.timeline.now < loop.paused_until:
                loop.deferred.append(self)  # the process is paused, so this runs when it continues
                return
        _set_running_loop(loop)
        self.context.run(self.callback, *self.args)
        _set_running_loop(None)


class VirtualLoop:
    """The part of `asyncio.AbstractEventLoop` that tasks, timers and queues use."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        self.runs = True
        """The process is neither dead nor paused."""
        self.is_dead = self.is_cleaning_up = self.was_killed = False
        self.paused_until = 0.0
        self.deferred: list[Handle] = []
        """Callbacks that became due while the process was paused."""
        self.signal_handlers: dict[int, tuple[Callable[..., object], tuple[Any, ...]]] = {}
        self.leftovers: deque[Handle] = deque()
        self.tasks: list[asyncio.Task[Any]] = []
        """All tasks ever created. Nothing else refers to a task whose process has ended."""

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
        handle = Handle(self, callback, args, context, 0.0)
        if self.is_dead:
            self.leftovers.append(handle)
        else:
            self.timeline.ready.append(handle.run)
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
            self.leftovers.append(handle)
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
        self.tasks.append(task)
        return task

    def add_signal_handler(self, number: int, callback: Callable[..., object], *args: Any) -> None:
        self.signal_handlers[number] = (callback, args)

    def run_signal_handler(self, number: int) -> bool:
        """Run the handler of a signal. False: there is none."""
        if number not in self.signal_handlers:
            return False
        callback, args = self.signal_handlers[number]
        self.call_soon(callback, *args)
        return True

    def pause(self, seconds: float) -> None:
        """SIGSTOP, and SIGCONT after some seconds."""
        self.paused_until = max(self.paused_until, self.timeline.now + seconds)
        self.runs = False
        self.timeline.after(seconds, self._continue)

    def _continue(self) -> None:
        if self.timeline.now >= self.paused_until and not self.is_dead:
            self.runs = True
            deferred, self.deferred = self.deferred, []
            self.timeline.ready.extend(handle.run for handle in deferred)

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """asyncio reports exceptions here that no code retrieved. This does nothing, because
        `unretrieved_exceptions` finds them."""

    def kill(self) -> None:
        """The process has ended. No waiting coroutine continues."""
        self.is_dead, self.runs = True, False


def unretrieved_exceptions(loops: Sequence[VirtualLoop]) -> list[BaseException]:
    """Exceptions of tasks that no code has retrieved.

    A leader that gives up retrieves that from its tasks at its end. If it is killed before its end,
    its `GivenUp` is no defect.
    """
    found = []
    for loop in loops:
        tasks = (task for task in loop.tasks if task.done() and not task.cancelled())
        for task in [task for task in tasks if cast(Any, task)._log_traceback]:
            exc = task.exception()
            if exc is not None and not (loop.was_killed and isinstance(exc, GivenUp)):
                found.append(exc)
    return found


def cancel_leftovers(loops: Sequence[VirtualLoop]) -> None:
    """Cancel the tasks that ended processes left, so that no coroutine is dropped unfinished.
    Coroutines that await during cleanup need another round."""
    _set_running_loop(None)  # still set if a callback raised
    for loop in loops:
        loop.is_dead, loop.runs, loop.is_cleaning_up = True, False, True
        loop.leftovers.extend(loop.deferred)
        ready = loop.timeline.ready
    while loops and ready:
        ready.popleft()()
    for _ in range(MOST_ROUNDS):
        tasks = [task for loop in loops for task in loop.tasks if not task.done()]
        unfinished = [loop for loop in loops if loop.leftovers]
        if not (tasks or unfinished):
            break
        for task in tasks:
            task.cancel()
        for loop in unfinished:
            leftovers, loop.leftovers = loop.leftovers, deque()
            for handle in leftovers:
                handle.run()
