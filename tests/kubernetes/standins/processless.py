"""A container that is said to run, and has no process: for jobs of many more pods than a machine
can run. It ends when it is stopped; a command in it is a process of this machine."""

import asyncio
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.kubernetes.standins.api import Object

ANNOTATION = "testbed/pretended"
"""Of a pod whose containers are to be such."""


def is_pretended(pod: Object) -> bool:
    return ANNOTATION in pod["metadata"].get("annotations", {})


@dataclass
class Pretended:
    environ: Mapping[str, str]
    log: Path
    ended: "asyncio.Future[int]" = field(init=False)

    async def start(self) -> None:
        self.ended = asyncio.get_running_loop().create_future()
        self.log.touch()

    async def wait(self) -> int:
        return await asyncio.shield(self.ended)

    async def stop(self, grace_s: float) -> None:
        self.signal(15)

    def signal(self, number: int) -> None:
        if not self.ended.done():
            self.ended.set_result(128 + number)

    def pids(self) -> list[int]:
        """None of its own; while it runs, the one that says so."""
        return [] if self.ended.done() else [os.getpid()]

    def command(self, argv: Sequence[str]) -> list[str]:
        return list(argv)
