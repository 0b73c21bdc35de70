"""The agent's side of the fork server: starts it ahead of time, and a new one if it was killed."""

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

from orchestrator.agent.evidence.rank_evidence import process_state
from orchestrator.agent.processes.fork_server import (
    Begun,
    Ended,
    LaunchAnswer,
    LaunchOrder,
    Run,
    Try,
)
from orchestrator.agent.processes.torchrun import HostPlace
from orchestrator.contract.codec import decode, encode_tagged
from orchestrator.contract.files.env import SAFE_PATH
from orchestrator.contract.read_json import read_json
from orchestrator.run_module import command

LINE_BYTES = 16 << 20
"""Longest answer."""
END_S = 1.0
"""Limit for a fork server to end after it closed its output."""
KILLED = Ended(code=-signal.SIGKILL, out="", err="the fork server was killed")

Process = asyncio.subprocess.Process


class Running:
    """A process that a fork server (the launcher) runs."""

    def __init__(self, launcher: Process, pid: int, standby: "Standby") -> None:
        self.launcher = launcher
        self.pid = pid
        self.ended: Ended | None = None
        self.launcher_signal: int | None = None
        """The signal that killed the fork server, and so this process."""
        self._standby = standby
        self._waiting = asyncio.create_task(self._wait())

    async def wait(self) -> Ended:
        # A cancelled caller must not cancel the task that takes the fork server back.
        return await asyncio.shield(self._waiting)

    def kill(self) -> None:
        if self.ended is None:
            # Safe: the fork server does not reap the process before its next order.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    async def _wait(self) -> Ended:
        answer = await _answer(self.launcher)
        assert isinstance(answer, Ended)
        if answer is KILLED:
            self.launcher_signal = await _killed_by(self.launcher)
        self.ended = answer
        await self._standby.take_back(self.launcher, is_well=answer is not KILLED)
        return answer


class Standby:
    """Keeps one idle fork server ready for the next order."""

    def __init__(self, place: HostPlace, environ: Mapping[str, str]) -> None:
        self.place = place
        self.environ = environ
        self.waiting: Process | None = None
        self.busy: set[Process] = set()

    async def prepare(self) -> None:
        """Start a fork server ahead of time, so that its imports are done when it is needed."""
        with contextlib.suppress(OSError):  # the first order tries again, and raises it
            self.waiting = await self._take()

    async def run(
        self, command: Sequence[str], environ: Mapping[str, str], *, title: str, log: Path
    ) -> Running:
        """Start `command`. Raises OSError if it cannot be started."""
        order = Run(command=tuple(command), environ=dict(environ), title=title, log=str(log))
        return await self._order(order)

    async def try_out(
        self, command: Sequence[str], environ: Mapping[str, str], *, title: str, given: str
    ) -> Ended:
        """Run `command` to its end. If this is cancelled, the fork server and the command are
        killed. Raises OSError if it cannot be started."""
        order = Try(command=tuple(command), environ=dict(environ), title=title, given=given)
        running = await self._order(order)
        try:
            return await running.wait()
        except BaseException:
            await _end(running.launcher)
            raise

    async def take_back(self, launcher: Process, *, is_well: bool) -> None:
        """Called when the launcher's process has ended. One idle fork server is kept."""
        self.busy.discard(launcher)
        if is_well and self.waiting is None:
            self.waiting = launcher
        else:
            await _end(launcher)

    async def learn(self) -> None:
        """Start a fork server with the modules that the ranks have imported by now. It replaces the
        idle one. One that runs ranks ends with them, because only one idle one is kept."""
        former, self.waiting = self.waiting, None
        await self.prepare()
        if former is not None:
            await _end(former)

    async def close(self) -> None:
        """Kill every fork server, and with it the process that it runs."""
        waiting, self.waiting = self.waiting, None
        for launcher in [waiting, *self.busy]:
            if launcher is not None:
                await _end(launcher)

    async def _order(self, order: LaunchOrder) -> Running:
        launcher = await self._take()
        self.busy.add(launcher)
        try:
            assert launcher.stdin is not None
            launcher.stdin.write(json.dumps(encode_tagged(order)).encode() + b"\n")
            with contextlib.suppress(ConnectionError):  # it was killed; `_answer` returns KILLED
                await launcher.stdin.drain()
            answer = await _answer(launcher)
        # The answer may still come. It would be read as the answer to the next order, so the fork
        # server is not used again.
        except BaseException:
            await self._give_up(launcher)
            raise
        if isinstance(answer, Begun):
            return Running(launcher, answer.pid, self)
        await self._give_up(launcher)
        raise OSError(answer.err)

    async def _give_up(self, launcher: Process) -> None:
        self.busy.discard(launcher)
        await _end(launcher)

    async def _take(self) -> Process:
        """The idle fork server, or a new one. It runs one process, so it is not idle any more."""
        waiting, self.waiting = self.waiting, None
        # Something may have killed the idle fork server since it was started.
        if waiting is not None and _is_there(waiting):
            return waiting
        return await self._start()

    async def _start(self) -> Process:
        place = self.place
        return await asyncio.create_subprocess_exec(
            *command(place.python, "orchestrator.agent.processes.fork_server"),
            *("--parent", str(place.parent), "--lock", str(place.lock)),
            *([] if place.learned is None else ["--learned", str(place.learned)]),
            *("--", *place.imports),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            # Its own modules come from a safe path, whatever the ranks get.
            env={**self.environ, **place.environ, SAFE_PATH: "1"},
            start_new_session=True,
            limit=LINE_BYTES,
        )


def _is_there(launcher: Process) -> bool:
    return process_state(launcher.pid) not in ("gone", "Z")


async def _answer(launcher: Process) -> LaunchAnswer:
    assert launcher.stdout is not None
    # A fork server answers each order, even one that fails. Its output ends only with itself.
    line = await launcher.stdout.readline()
    answer: LaunchAnswer = decode(LaunchAnswer, read_json(line)) if line else KILLED
    return answer


async def _killed_by(process: Process) -> int | None:
    """The signal that ended a process whose output is closed; None if it was not a signal."""
    try:
        code = await asyncio.wait_for(process.wait(), END_S)
    except TimeoutError:
        return None
    return -code if code < 0 else None


async def _end(process: Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await process.wait()
