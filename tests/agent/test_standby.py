"""The agent's end of a launcher, with real ones."""

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import pytest

from orchestrator.agent.evidence import process_state
from orchestrator.agent.launcher import Tried
from orchestrator.agent.standby import Standby
from orchestrator.locks import is_free
from tests.agent.world import WAIT_S, a_place, is_gone, kill, until

pytestmark = pytest.mark.process

T = TypeVar("T")


def play(folder: Path, script: Callable[[Standby], Awaitable[T]]) -> T:
    async def run() -> T:
        standby = Standby(a_place(folder), os.environ)
        try:
            return await asyncio.wait_for(script(standby), WAIT_S)
        finally:
            await standby.close()

    return asyncio.run(run())


def test_what_waits_is_what_runs(tmp_path: Path) -> None:
    async def script(standby: Standby) -> None:
        await standby.prepare()
        assert standby.waiting is not None
        waiting = standby.waiting.pid
        ran = await standby.run(["sh", "-c", "echo $$; exit 3"], os.environ, tmp_path / "log")
        assert (ran.pid, await ran.wait()) == (waiting, 3)
        assert standby.waiting is None
        assert (tmp_path / "log").read_text() == f"{waiting}\n"

    play(tmp_path, script)


def test_one_that_was_killed_while_it_waited_is_replaced(tmp_path: Path) -> None:
    async def script(standby: Standby) -> int:
        await standby.prepare()
        assert standby.waiting is not None
        kill(killed := standby.waiting.pid)
        await until(lambda: process_state(killed) in ("gone", "Z"), "its end")
        ran = await standby.run(["true"], os.environ, tmp_path / "log")
        return await ran.wait()

    assert play(tmp_path, script) == 0


def test_what_has_been_tried_leaves_the_launcher_for_the_next(tmp_path: Path) -> None:
    async def script(standby: Standby) -> tuple[Tried, Tried]:
        ask = ["sh", "-c", "cat; echo $PPID >&2"]
        first = await standby.try_out(ask, os.environ, "one")
        return first, await standby.try_out(ask, os.environ, "two")

    first, second = play(tmp_path, script)
    assert (first.code, first.out, second.out) == (0, "one", "two")
    assert first.err == second.err, "the same parent"


def test_a_run_does_not_wait_for_what_is_being_tried(tmp_path: Path) -> None:
    async def script(standby: Standby) -> int:
        trying = asyncio.create_task(standby.try_out(["sleep", "600"], os.environ, ""))
        await until(lambda: not is_free(standby.place.lock), "what is tried")
        ran = await standby.run(["true"], os.environ, tmp_path / "log")
        code = await ran.wait()
        assert not trying.done()
        trying.cancel()
        await asyncio.gather(trying, return_exceptions=True)
        return code

    assert play(tmp_path, script) == 0


def test_what_is_given_up_is_killed_with_its_launcher(tmp_path: Path) -> None:
    async def script(standby: Standby) -> int:
        told = f"echo $PPID > {tmp_path}/pid; exec sleep 600"
        trying = asyncio.create_task(standby.try_out(["sh", "-c", told], os.environ, ""))
        pid = tmp_path / "pid"
        launcher = await until(lambda: pid.exists() and pid.read_text(), "what is tried")
        trying.cancel()
        await asyncio.gather(trying, return_exceptions=True)
        assert standby.waiting is None
        return int(launcher)

    assert is_gone(play(tmp_path, script))


def test_a_launcher_that_is_killed_meanwhile_is_an_answer(tmp_path: Path) -> None:
    async def script(standby: Standby) -> Tried:
        return await standby.try_out(["sh", "-c", "kill -9 $PPID; exec sleep 600"], os.environ, "")

    assert play(tmp_path, script) == Tried(code=-9, out="", err="the launcher was killed")


def test_no_python_is_no_matter_until_it_is_needed(tmp_path: Path) -> None:
    async def script(standby: Standby) -> None:
        Path(standby.place.python).unlink()
        await standby.prepare()
        with pytest.raises(OSError, match="python"):
            await standby.run([sys.executable], os.environ, tmp_path / "log")

    play(tmp_path, script)
