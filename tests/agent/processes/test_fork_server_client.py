"""The agent's client of the fork server, with real fork servers."""

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


def run_script(folder: Path, script: Callable[[Standby], Awaitable[T]]) -> T:
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


def test_the_waiting_fork_server_serves_one_run_after_the_other(tmp_path: Path) -> None:
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

    run_script(tmp_path, script)


def test_kill_ends_a_run_and_does_nothing_after_its_end(tmp_path: Path) -> None:
    async def script(standby: Standby) -> None:
        ran = await run(standby, "sleep", "600", log=tmp_path / "log")
        ran.kill()
        assert (await ran.wait()).code == -9
        ran.kill()
        assert process_state(ran.pid) == "Z", "it is not reaped yet, so its pid cannot be reused"
        assert (await try_out(standby, "true")).code == 0
        assert process_state(ran.pid) == "gone"

    run_script(tmp_path, script)


def test_a_fork_server_killed_while_it_waits_is_replaced(tmp_path: Path) -> None:
    async def script(standby: Standby) -> Ended:
        await standby.prepare()
        assert standby.waiting is not None
        kill(killed := standby.waiting.pid)
        await until(lambda: process_state(killed) in ("gone", "Z"), "its end")
        ran = await run(standby, "true", log=tmp_path / "log")
        return await ran.wait()

    assert run_script(tmp_path, script).code == 0


def test_a_run_ends_with_its_killed_fork_server(tmp_path: Path) -> None:
    async def script(standby: Standby) -> None:
        ran = await run(standby, "sleep", "600", log=tmp_path / "log")
        kill(ran.launcher.pid)
        assert (await ran.wait()).err == "the fork server was killed"
        await until(lambda: process_state(ran.pid) == "gone", "its end")
        again = await run(standby, "true", log=tmp_path / "log")
        assert (await again.wait()).code == 0

    run_script(tmp_path, script)


def test_a_fork_server_serves_one_try_after_the_other(tmp_path: Path) -> None:
    async def script(standby: Standby) -> tuple[Ended, Ended]:
        ask = ("sh", "-c", "cat; echo $PPID >&2")
        first = await try_out(standby, *ask, given="one")
        return first, await try_out(standby, *ask, given="two")

    first, second = run_script(tmp_path, script)
    assert (first.code, first.out, second.out) == (0, "one", "two")
    assert first.err == second.err, "both tries have the same parent"


def test_a_run_does_not_wait_for_a_try(tmp_path: Path) -> None:
    async def script(standby: Standby) -> Ended:
        trying = asyncio.create_task(try_out(standby, "sleep", "600"))
        await until(lambda: not is_free(standby.place.lock), "the try")
        ran = await run(standby, "true", log=tmp_path / "log")
        ended = await ran.wait()
        assert not trying.done()
        trying.cancel()
        await asyncio.gather(trying, return_exceptions=True)
        return ended

    assert run_script(tmp_path, script).code == 0


def test_one_of_two_idle_fork_servers_is_kept(tmp_path: Path) -> None:
    async def script(standby: Standby) -> None:
        runs = [await run(standby, "sleep", "0.01", log=tmp_path / "log") for _ in range(2)]
        await asyncio.gather(*(one.wait() for one in runs))
        assert standby.waiting is not None
        assert not standby.busy
        gone = [one for one in runs if process_state(one.launcher.pid) == "gone"]
        assert len(gone) == 1

    run_script(tmp_path, script)


def test_a_cancelled_try_is_killed_with_its_fork_server(tmp_path: Path) -> None:
    async def script(standby: Standby) -> int:
        command = f"echo $PPID > {tmp_path}/pid; exec sleep 600"
        trying = asyncio.create_task(try_out(standby, "sh", "-c", command))
        pid = tmp_path / "pid"
        launcher = await until(lambda: pid.exists() and pid.read_text(), "the try")
        trying.cancel()
        await asyncio.gather(trying, return_exceptions=True)
        assert standby.waiting is None
        return int(launcher)

    assert is_gone(run_script(tmp_path, script))


def test_a_fork_server_killed_during_a_try_is_reported(tmp_path: Path) -> None:
    async def script(standby: Standby) -> Ended:
        return await try_out(standby, "sh", "-c", "kill -9 $PPID; exec sleep 600")

    assert run_script(tmp_path, script) == Ended(code=-9, out="", err="the fork server was killed")


def test_a_missing_python_raises_only_when_it_is_needed(tmp_path: Path) -> None:
    async def script(standby: Standby) -> None:
        Path(standby.place.python).unlink()
        await standby.prepare()
        with pytest.raises(OSError, match="python"):
            await run(standby, sys.executable, log=tmp_path / "log")

    run_script(tmp_path, script)
