"""The event loop of a simulated process: virtual time, a kill, a stop, a signal."""

import asyncio
import signal
from typing import Any

from orchestrator.simulation.clock import Timeline
from orchestrator.simulation.processes.loop import (
    VirtualLoop,
    cancel_leftovers,
    unretrieved_exceptions,
)


def run_on_a_loop(script: Any) -> tuple[Timeline, VirtualLoop]:
    timeline = Timeline()
    loop = VirtualLoop(timeline)
    loop.create_task(script())
    while timeline.run_next():
        pass
    return timeline, loop


def test_sleeping_takes_virtual_time() -> None:
    woken: list[str] = []

    async def sleep(seconds: float, name: str) -> None:
        await asyncio.sleep(seconds)
        woken.append(name)

    async def script() -> None:
        await asyncio.gather(sleep(3600.0, "late"), sleep(1.0, "early"))

    timeline, _ = run_on_a_loop(script)
    assert (woken, timeline.now) == (["early", "late"], 3600.0)


def test_wait_for_times_out_in_virtual_time() -> None:
    ended: list[str] = []

    async def script() -> None:
        try:
            await asyncio.wait_for(asyncio.Event().wait(), 5.0)
        except TimeoutError:
            ended.append("timeout")

    timeline, _ = run_on_a_loop(script)
    assert (ended, timeline.now) == (["timeout"], 5.0)


def test_a_killed_process_runs_no_further_callback() -> None:
    seen: list[str] = []

    async def script() -> None:
        try:
            await asyncio.sleep(10.0)
            seen.append("woken")
        finally:
            seen.append("cleaned up")

    timeline = Timeline()
    loop = VirtualLoop(timeline)
    loop.create_task(script())
    timeline.after(1.0, loop.kill)
    while timeline.run_next():
        pass
    assert seen == []
    cancel_leftovers([loop])
    assert seen == ["cleaned up"]


def test_an_exception_that_no_code_retrieves_is_found() -> None:
    async def script() -> None:
        raise ValueError("no code awaits this")

    _, loop = run_on_a_loop(script)
    assert [str(one) for one in unretrieved_exceptions([loop])] == ["no code awaits this"]


def test_a_paused_process_continues_where_it_stopped() -> None:
    woken: list[float] = []

    async def script() -> None:
        for _ in range(3):
            await asyncio.sleep(1.0)
            woken.append(timeline.now)

    timeline = Timeline()
    loop = VirtualLoop(timeline)
    loop.create_task(script())
    timeline.after(1.5, lambda: loop.pause(10.0))
    while timeline.run_next():
        pass
    assert woken == [1.0, 11.5, 12.5]


def test_a_signal_runs_the_newest_handler() -> None:
    handled: list[str] = []
    timeline = Timeline()
    loop = VirtualLoop(timeline)
    assert not loop.run_signal_handler(signal.SIGTERM)
    loop.add_signal_handler(signal.SIGTERM, handled.append, "first")
    loop.add_signal_handler(signal.SIGTERM, handled.append, "second")
    assert loop.run_signal_handler(signal.SIGTERM)
    timeline.run_next()
    assert handled == ["second"]
