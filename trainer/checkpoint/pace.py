"""`checkpoint.every: auto`: how many steps to make between two saves, as rank 0 reckons it.

Steps are in lockstep, so what rank 0 waits is what all wait: the time for which training stood
still, and what the steps made meanwhile took longer than others. The ranks agree in the totals of a
step.
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
"""Of the interval: less is noise."""


@dataclass(frozen=True, slots=True)
class Proposal:
    every: int
    why: str


class Pace:
    def __init__(self, env: RankEnv) -> None:
        given: SavePace = decode(SavePace, read_json(env.pace))
        self.every = given.every_steps
        """What an earlier attempt had come to."""
        self._exposure = given.exposure
        self._hosts = max(1, env.world_size // env.local_world_size)
        self._begun = time.perf_counter()

    def propose(
        self,
        every: int,
        block_s: float,
        write_s: float,
        meanwhile: Sequence[float],
        others: Sequence[float],
    ) -> Proposal | None:
        """Another interval than `every` steps, if a save that cost this much asks for one.

        `meanwhile` are the lengths of the steps that were made while it was written, `others` of
        steps beside no save.
        """
        step_s = median(others or meanwhile) if others or meanwhile else 0.0
        if not step_s:
            return None
        cost_s = block_s + max(0.0, sum(meanwhile) - len(meanwhile) * step_s)
        mtbf_s = self._exposure.mtbf_s(self._hosts, time.perf_counter() - self._begun)
        found = interval_of(cost_s, write_s, mtbf_s)
        steps = max(1, round(found.seconds / step_s))
        if abs(steps - every) <= LEAST_CHANGE * every:
            return None
        bound = f", bounded: {found.bound}" if found.bound else ""
        why = (
            f"a save costs {cost_s:.3g} s, a step takes {step_s:.3g} s, and a failure is expected"
            f" every {mtbf_s / 3600:.3g} h after {self._exposure.failures} so far{bound}"
        )
        return Proposal(steps, why)
