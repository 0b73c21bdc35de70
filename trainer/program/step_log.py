"""Writes the optimizer steps of a script that reports no metrics to `metrics.jsonl`."""

import json
import time
from collections.abc import Callable

from ndctl.rank.fence import GivenUp
from ndctl.rank.line_file import LineFile
from ndctl.rank.link import Link
from orchestrator.contract.files.env import RankEnv
from orchestrator.contract.files.run_dir import RunDir
from trainer.rank.fence import admit_of

EVERY_S = 0.5
"""A script may do thousands of steps per second."""


class StepLog:
    def __init__(
        self,
        link: Link,
        run_dir: RunDir,
        env: RankEnv,
        clock: Callable[[], float] = time.time,  # noqa: TID251 (it is written next to the step)
    ) -> None:
        self.link, self.attempt, self.clock = link, env.attempt, clock
        # The steps of all ranks are the same.
        wanted = env.rank == 0 and bool(env.heartbeat_socket)
        self.file = LineFile(run_dir.metrics, admit_of(run_dir, env)) if wanted else None
        self.written = 0.0
        self.left = 0
        """The last step, if no line has it yet."""

    def stepped(self, step: int) -> None:
        first, self.left = self.written == 0.0 and not self.left, step
        # The first step is written with the second one: a script that calls `ndctl.log` does so
        # after its first step, and then writes all lines itself.
        if self.file is not None and not first and self.clock() - self.written >= EVERY_S:
            self._write()

    def close(self) -> None:
        if self.file is not None and self.left and not self.link.logged:
            self._write()

    def _write(self) -> None:
        assert self.file is not None
        self.written = self.clock()
        known = {"attempt": self.attempt, "step": self.left, "loss": None, "time": self.written}
        line = {**known, **self.link.use}
        self.left = 0
        try:
            self.file.append(json.dumps(line).encode() + b"\n")
        except GivenUp:  # a later attempt runs; the agent of this one ends the rank
            self.file = None
