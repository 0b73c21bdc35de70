"""The agent's end of a launcher, with real ones."""

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import pytest

from orchestrator.agent.evidence.rank_evidence import process_state
from orchestrator.agent.processes.fork_server import Ended
from orchestrator.agent.processes.fork_server_client import Running, Standby
from orchestrator.posix.locks import is_free
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


SHOW = ["sh", "-c", "echo $PPID; exit 3"]


async def run(standby: Standby, *command: str, log: Path) -> Running:
    return await standby.run(command, os.environ, title="torchrun", log=log)


async def try_out(standby: Standby, *command: str, given: str = "") -> Ended:
    return await standby.try_out(command, os.environ, title="check", given=given)


def test_the_launcher_that_waits_is_there_for_all_that_runs(tmp_path: Path) -> None:
    async def script(standby: Standby) -> None:
        await standby.prepare()
        assert standby.waiting is not None
        waiting = standby.waiting.pid
        for _ in range(2):
            ran = await run(standby, *SHOW, log=tmp_path / "log")
            assert standby.waiting is None
            assert (await ran.wait()).code == 3
            assert standby.waiting.pid == waiting
        assert (tmp_path / "log").read_text() == f"{waiting}\n" * 2

    play(tmp_path, script)


def test_what_runs_can_be_killed_and_after_its_end_nobody_is(tmp_path: Path) -> None:
    async def script(standby: Standby) -> None:
        ran = await run(standby, "sleep", "600", log=tmp_path / "log")
        ran.kill()
        assert (await ran.wait()).code == -9
        ran.kill()
        assert process_state(ran.pid) == "Z", "its number stays its own"
        assert (await try_out(standby, "true")).code == 0
        assert process_state(ran.pid) == "gone"

    play(tmp_path, script)


def test_one_that_was_killed_while_it_waited_is_replaced(tmp_path: Path) -> None:
    async def script(standby: Standby) -> Ended:
        await standby.prepare()
        assert standby.waiting is not None
        kill(killed := standby.waiting.pid)
        await until(lambda: process_state(killed) in ("gone", "Z"), "its end")
        ran = await run(standby, "true", log=tmp_path / "log")
        return await ran.wait()

    assert play(tmp_path, script).code == 0


def test_one_that_is_killed_takes_what_it_runs_with_it(tmp_path: Path) -> None:
    async def script(standby: Standby) -> None:
        ran = await run(standby, "sleep", "600", log=tmp_path / "log")
        kill(ran.launcher.pid)
        assert (await ran.wait()).err == "the fork server was killed"
        await until(lambda: process_state(ran.pid) == "gone", "its end")
        again = await run(standby, "true", log=tmp_path / "log")
        assert (await again.wait()).code == 0

    play(tmp_path, script)


def test_what_has_been_tried_leaves_the_launcher_for_the_next(tmp_path: Path) -> None:
    async def script(standby: Standby) -> tuple[Ended, Ended]:
        ask = ("sh", "-c", "cat; echo $PPID >&2")
        first = await try_out(standby, *ask, given="one")
        return first, await try_out(standby, *ask, given="two")

    first, second = play(tmp_path, script)
    assert (first.code, first.out, second.out) == (0, "one", "two")
    assert first.err == second.err, "the same parent"


def test_a_run_does_not_wait_for_what_is_being_tried(tmp_path: Path) -> None:
    async def script(standby: Standby) -> Ended:
        trying = asyncio.create_task(try_out(standby, "sleep", "600"))
        await until(lambda: not is_free(standby.place.lock), "what is tried")
        ran = await run(standby, "true", log=tmp_path / "log")
        ended = await ran.wait()
        assert not trying.done()
        trying.cancel()
        await asyncio.gather(trying, return_exceptions=True)
        return ended

    assert play(tmp_path, script).code == 0


def test_of_two_launchers_that_are_done_one_goes_on_waiting(tmp_path: Path) -> None:
    async def script(standby: Standby) -> None:
        both = [await run(standby, "sleep", "0.01", log=tmp_path / "log") for _ in range(2)]
        await asyncio.gather(*(one.wait() for one in both))
        assert standby.waiting is not None
        assert not standby.busy
        gone = [one for one in both if process_state(one.launcher.pid) == "gone"]
        assert len(gone) == 1

    play(tmp_path, script)


def test_what_is_given_up_is_killed_with_its_launcher(tmp_path: Path) -> None:
    async def script(standby: Standby) -> int:
        told = f"echo $PPID > {tmp_path}/pid; exec sleep 600"
        trying = asyncio.create_task(try_out(standby, "sh", "-c", told))
        pid = tmp_path / "pid"
        launcher = await until(lambda: pid.exists() and pid.read_text(), "what is tried")
        trying.cancel()
        await asyncio.gather(trying, return_exceptions=True)
        assert standby.waiting is None
        return int(launcher)

    assert is_gone(play(tmp_path, script))


def test_a_launcher_that_is_killed_meanwhile_is_an_answer(tmp_path: Path) -> None:
    async def script(standby: Standby) -> Ended:
        return await try_out(standby, "sh", "-c", "kill -9 $PPID; exec sleep 600")

    assert play(tmp_path, script) == Ended(code=-9, out="", err="the fork server was killed")


def test_no_python_is_no_matter_until_it_is_needed(tmp_path: Path) -> None:
    async def script(standby: Standby) -> None:
        Path(standby.place.python).unlink()
        await standby.prepare()
        with pytest.raises(OSError, match="python"):
            await run(standby, sys.executable, log=tmp_path / "log")

    play(tmp_path, script)
