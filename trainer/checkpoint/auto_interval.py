"""`checkpoint.every: auto`: rank 0 computes how many steps to make between two saves.

All ranks run in lockstep, so the cost that rank 0 measures is the cost for all: the time training
was paused, plus the time that steps lost while the save was written in the background. With
checkpoints in memory only those failures count that they do not cover. The totals of a step
distribute the new interval.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from orchestrator.contract.checkpoint_interval import SavePace, interval_of
from orchestrator.contract.codec import decode
from orchestrator.contract.files.env import RankEnv
from orchestrator.contract.read_json import read_json

LEAST_CHANGE = 0.1
"""Smaller relative changes of the interval are ignored as noise."""


@dataclass(frozen=True, slots=True)
class Proposal:
    every: int
    why: str


class AutoInterval:
    def __init__(self, env: RankEnv) -> None:
        given: SavePace = decode(SavePace, read_json(env.pace))
        self.every = given.every_steps
        """The interval at the end of the previous attempt; None in the first one."""
        self._exposure = given.exposure
        self._hosts = max(1, env.world_size // env.local_world_size)
        self._begun = time.perf_counter()

    def propose(
        self,
        every: int,
        block_s: float,
        write_s: float,
        during: Sequence[float],
        between: Sequence[float],
        *,
        remembers: bool,
    ) -> Proposal | None:
        """A better interval than `every` steps for the measured cost of a save, if there is one.

        Args:
            block_s: seconds that the save paused training.
            write_s: seconds until the save was complete.
            during: seconds of each step that ran while the save was written.
            between: seconds of steps without a save.
            remembers: the job has checkpoints in memory, too.
        """
        step_s = median(between or during) if between or during else 0.0
        if not step_s:
            return None
        cost_s = block_s + max(0.0, sum(during) - len(during) * step_s)
        exposure = self._exposure
        mtbf_s = exposure.mtbf_s(self._hosts, time.perf_counter() - self._begun)
        failures, seen = "failure", f"failures so far: {exposure.failures}"
        if remembers:
            mtbf_s /= exposure.on_disk
            failures = "failure that memory does not cover"
            seen += f", {exposure.failures - exposure.in_memory} of them not covered"
        found = interval_of(cost_s, write_s, mtbf_s)
        steps = max(1, round(found.seconds / step_s))
        if abs(steps - every) <= LEAST_CHANGE * every:
            return None
        bound = f", bounded: {found.bound}" if found.bound else ""
        why = (
            f"a save costs {cost_s:.3g} s, a step takes {step_s:.3g} s, and one {failures} per"
            f" {mtbf_s / 3600:.3g} h is expected ({seen}){bound}"
        )
        return Proposal(steps, why)
