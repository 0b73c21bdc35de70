"""A container that is reported as running but has no process.

It is for jobs with more pods than one machine can run. It ends when it is stopped. `kubectl exec`
runs the command as a process of this machine.
"""

import asyncio
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.kubernetes.standins.api import Object

ANNOTATION = "testbed/processless"
"""Set on a pod whose containers get no process."""


def is_processless(pod: Object) -> bool:
    return ANNOTATION in pod["metadata"].get("annotations", {})


@dataclass
class ProcesslessContainer:
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
        """While it runs, the id of this process: callers need a pid that exists."""
        return [] if self.ended.done() else [os.getpid()]

    def command(self, argv: Sequence[str]) -> list[str]:
        return list(argv)
