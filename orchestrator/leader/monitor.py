"""Runs the detectors of hangs, stragglers and progress during an attempt, and yields their events.

The detectors are `detect/heartbeat_monitor.py` and `detect/stragglers.py`. `now` is monotonic; the
leader gives the events their time.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

from orchestrator.contract.messages.agent_protocol import Digest, MemoryUse
from orchestrator.contract.messages.events import (
    Event,
    HangDetected,
    JobSubmitted,
    ProgramRuns,
)
from orchestrator.detect.heartbeat_monitor import HeartbeatMonitor, Limits
from orchestrator.detect.stragglers import Stragglers, roles_of
from orchestrator.job.attempt_end import EVIDENCE_S
from orchestrator.job.state import Run

RUNS_S = 10.0
"""A program that reports no step runs if all its ranks have lived for so long. Most errors of an
import or an argument come earlier, and so do the first steps of many programs."""


class Monitor:
    def __init__(self, job: JobSubmitted) -> None:
        self.own_program = job.run is not None
        self.runs_since: float | None = None
        """Since when all ranks of a user's program are alive; infinite once that was told."""
        self.limits = Limits(
            hang=job.hang_timeout, init=job.init_timeout, checkpoint=job.checkpoint_timeout
        )
        self.attempt = 0
        self.watch: HeartbeatMonitor | None = None
        """None while no attempt runs."""
        self.stragglers = Stragglers(0, (), str, 0.0)
        self.memory: dict[str, MemoryUse] = {}
        """Host -> its checkpoints in memory, as it last reported."""
        self.hang: HangDetected | None = None
        """The hang that was reported to the supervisor, ..."""
        self.gathered_by = 0.0
        """... and when all agents have finished gathering evidence of it."""
        self.excused_s = 0.0
        """Seconds in which the leader did not run. They are subtracted from the detectors' time."""

    def excuse(self, seconds: float) -> None:
        """Ignore a time in which the leader did not run. Perhaps the whole job was suspended
        (`scontrol suspend`), so the silence of its ranks means nothing."""
        self.excused_s += seconds

    def begin(self, attempt: int, run: Run, now: float) -> None:
        """Start to watch an attempt when its start is ordered. So a lost order also ends as a hang
        of the start."""
        now -= self.excused_s
        hosts, each = run.attempt.placement, run.plan.ranks_per_host
        self.watch = HeartbeatMonitor(attempt, range(run.plan.world_size), self.limits, now)
        self.stragglers = Stragglers(
            attempt, roles_of(run.plan.mesh), lambda rank: hosts[rank // each], now
        )
        self.attempt, self.hang, self.gathered_by, self.memory = attempt, None, 0.0, {}
        self.runs_since = None

    def end(self) -> None:
        self.watch = None

    @property
    def still_s(self) -> float | None:
        """Agents report at once when ranks make no progress within a step for so long."""
        return None if self.watch is None else self.watch.limit("train")

    def rank_figures(self, now: float) -> Mapping[str, Sequence[float]]:
        """Figures of all ranks that run, in no order, for metrics: `heartbeat_age` in seconds, and
        `own_step`, the seconds of a rank's own work per step. And of all hosts, for checkpoints in
        memory: their bytes, the copies that they hold, and seconds since their own were copied.
        """
        if self.watch is None:
            return {}
        ages = self.watch.ages(now - self.excused_s)
        memory = self.memory.values()
        return {
            "heartbeat_age": ages,
            "own_step": list(self.stragglers.own_s.values()),
            "memory_bytes": [float(one.num_bytes) for one in memory],
            "memory_held": [float(one.held) for one in memory],
            "memory_damaged": [float(one.damaged) for one in memory],
            "memory_copy_age": [one.copied_s for one in memory if one.copied_s is not None],
        }

    def hear(self, digest: Digest, now: float) -> Iterator[Event]:
        """Take in an agent's report on its ranks."""
        # A digest of the former attempt may arrive after the next one was ordered to start.
        if self.watch is None or digest.attempt != self.attempt:
            return
        if digest.memory is not None:
            self.memory[digest.memory.host] = digest.memory
        now -= self.excused_s
        progress = self.watch.observe(digest.ranks, now)
        self.stragglers.observe(digest.ranks)
        if self.hang is not None:
            over = self.watch.hang_over(self.hang, digest.ranks, now)
            if over is not None:  # the ranks make progress again while agents gather evidence
                self.hang = None
                self.watch.tell_soon()
                yield over
        if progress is not None:
            yield progress

    def look(self, hears_all: Callable[[], bool], now: float) -> Iterator[Event]:
        """The events that are due by now.

        Args:
            hears_all: whether every host of the attempt was heard recently.
        """
        if self.watch is None:
            return
        now -= self.excused_s
        yield from self._program_runs(self.watch, now)
        yield from self.watch.changes(now)
        yield from self.stragglers.changes(now)
        hang = self.watch.hang(now)
        # After a false alarm the agents may still be gathering evidence, so a second hang would mix
        # with it.
        if hang is None or self.hang is not None or now < self.gathered_by:
            return
        # A silent host explains a stall better than a hang does, so wait until that host is heard
        # or lost.
        if hears_all():
            self.hang, self.gathered_by = hang, now + EVIDENCE_S
            yield hang

    def _program_runs(self, watch: HeartbeatMonitor, now: float) -> Iterator[ProgramRuns]:
        if not self.own_program or watch.step >= 0 or self.runs_since == math.inf:
            return
        if not watch.all_run():
            self.runs_since = None
        elif self.runs_since is None:
            self.runs_since = now
        elif now - self.runs_since >= RUNS_S:
            self.runs_since = math.inf
            yield ProgramRuns(attempt=self.attempt)
