"""The agent's end of a launcher: there before it is needed, and a new one when there is none."""

import asyncio
import contextlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from orchestrator.agent.evidence import process_state
from orchestrator.agent.launcher import LaunchOrder, Run, Tried, Try
from orchestrator.agent.torchrun import HostPlace
from orchestrator.contract.codec import decode, encode_tagged

LINE_BYTES = 16 << 20
"""Of an answer, at most."""

Process = asyncio.subprocess.Process


class Standby:
    def __init__(self, place: HostPlace, environ: Mapping[str, str]) -> None:
        self.place = place
        self.environ = environ
        self.waiting: Process | None = None

    async def prepare(self) -> None:
        """Have a launcher import what takes long, without need as yet. One that cannot be started
        is found out by whoever needs it."""
        with contextlib.suppress(OSError):
            self.waiting = await self._take()

    async def run(self, command: Sequence[str], environ: Mapping[str, str], log: Path) -> Process:
        """`command` as a process that is ours to wait for; raises OSError when it cannot be
        started."""
        order = Run(command=tuple(command), environ=dict(environ), log=str(log))
        process = await self._take()
        await _tell(process, order)
        assert process.stdin is not None
        process.stdin.close()
        return process

    async def try_out(
        self, command: Sequence[str], environ: Mapping[str, str], given: str
    ) -> Tried:
        """`command` to its end; one that is given up is killed. Raises OSError when it cannot be
        started."""
        process = await self._take()
        assert process.stdout is not None
        try:
            await _tell(process, Try(command=tuple(command), environ=dict(environ), given=given))
            line = await process.stdout.readline()
        except BaseException:
            await _end(process)
            raise
        if not line:
            return Tried(code=await process.wait(), out="", err="the launcher was killed")
        if self.waiting is None:
            self.waiting = process
        else:
            await _end(process)
        tried: Tried = decode(Tried, json.loads(line))
        return tried

    async def close(self) -> None:
        waiting, self.waiting = self.waiting, None
        if waiting is not None:
            await _end(waiting)

    async def _take(self) -> Process:
        """The one that waits, or a new one: whoever has it, nobody else does."""
        waiting, self.waiting = self.waiting, None
        if waiting is not None and process_state(waiting.pid) not in ("gone", "Z"):
            return waiting
        return await self._start()

    async def _start(self) -> Process:
        place = self.place
        return await asyncio.create_subprocess_exec(
            *(place.python, "-m", "orchestrator.agent.launcher"),
            *("--parent", str(place.parent), "--lock", str(place.lock), "--", *place.imports),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=self.environ,
            start_new_session=True,
            limit=LINE_BYTES,
        )


async def _tell(process: Process, order: LaunchOrder) -> None:
    assert process.stdin is not None
    process.stdin.write(json.dumps(encode_tagged(order)).encode() + b"\n")
    await process.stdin.drain()


async def _end(process: Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await process.wait()
