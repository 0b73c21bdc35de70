"""The real leader and the real agents, run in virtual time, keep the laws of the simulation."""

import asyncio
import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from orchestrator.simulation.clock import Timeline
from orchestrator.simulation.real.loop import VirtualLoop
from orchestrator.simulation.run import Simulation, simulate
from orchestrator.simulation.scenario import scenario

KINDS = (
    "rank",
    "error",
    "hang",
    "fabric",
    "nan",
    "memory",
    "agent",
    "host",
    "stuck",
    "slow",
    "leader",
    "switch",
    "partition",
    "storage-slow",
    "storage-full",
    "messages",
    "clock",
    "cancel",
)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Leaders and agents log each fault that they meet."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("kind", KINDS)
def test_every_law_holds_of_the_real_code(kind: str) -> None:
    outcomes = [simulate(seed, (kind,), real=True) for seed in range(2)]
    assert [(one.seed, one.broken) for one in outcomes if one.broken] == []


def test_one_seed_is_one_history_of_the_real_code() -> None:
    outcome = simulate(5, ("rank", "agent"), real=True, kept=True)
    assert len(outcome.history) > 10
    assert outcome == simulate(5, ("rank", "agent"), real=True, kept=True)


@pytest.mark.parametrize("kind", ["rank", "error", "nan", "memory"])
def test_real_and_played_agents_bring_a_job_to_the_same_end(kind: str) -> None:
    for seed in range(3):
        chosen = replace(
            scenario(seed, (kind,)), scheduled=False, successor_s=None, preflight=False
        )
        ends = []
        for real in (False, True):
            one = Simulation(chosen, real=real)
            one.run()
            ends.append(one.world.run.ending)
        assert ends[0] == ends[1], f"seed {seed}"


# The loop


def run_on_a_loop(script: Any) -> tuple[Timeline, VirtualLoop]:
    timeline = Timeline()
    loop = VirtualLoop(timeline)
    loop.create_task(script())
    while timeline.turn():
        pass
    return timeline, loop


def test_sleeping_takes_virtual_time() -> None:
    woken: list[str] = []

    async def sleeps(seconds: float, name: str) -> None:
        await asyncio.sleep(seconds)
        woken.append(name)

    async def script() -> None:
        await asyncio.gather(sleeps(3600.0, "late"), sleeps(1.0, "early"))

    timeline, _ = run_on_a_loop(script)
    assert (woken, timeline.now) == (["early", "late"], 3600.0)


def test_a_limit_ends_what_never_comes() -> None:
    ended: list[str] = []

    async def script() -> None:
        try:
            await asyncio.wait_for(asyncio.Event().wait(), 5.0)
        except TimeoutError:
            ended.append("timeout")

    timeline, _ = run_on_a_loop(script)
    assert (ended, timeline.now) == (["timeout"], 5.0)


def test_a_process_that_is_killed_runs_nothing_any_more() -> None:
    seen: list[str] = []

    async def script() -> None:
        try:
            await asyncio.sleep(10.0)
            seen.append("woken")
        finally:
            seen.append("taken apart")

    timeline = Timeline()
    loop = VirtualLoop(timeline)
    loop.create_task(script())
    timeline.after(1.0, loop.kill)
    while timeline.turn():
        pass
    assert seen == []
    loop.bury()
    assert seen == ["taken apart"]


def test_what_a_task_raises_unheard_is_a_defect() -> None:
    async def script() -> None:
        raise ValueError("nobody awaits this")

    _, loop = run_on_a_loop(script)
    assert [str(one) for one in loop.defects] == ["nobody awaits this"]
