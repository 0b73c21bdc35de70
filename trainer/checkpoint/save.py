"""Decides when checkpoints are saved, and what happens when a save fails.

Each rank writes its shards, one save at a time, in the background if the spec says so. A periodic
save that fails is logged and retried some steps later. The last save of a run is retried at once,
a few times.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch.distributed as dist

from ndctl.rank.checkpoint_files import remove_old
from ndctl.rank.priority import give_way
from orchestrator.contract.spec.job_spec import CheckpointSpec
from trainer.checkpoint.auto_interval import AutoInterval, Proposal
from trainer.checkpoint.buffers import HostBuffers
from trainer.checkpoint.collective import Outcome, Target, write_on_all_ranks
from trainer.checkpoint.memory.saves import MemoryCheckpoints
from trainer.checkpoint.pace import Pace
from trainer.checkpoint.schedule import AT_START, Resumed, Schedule
from trainer.checkpoint.state import TrainingState
from trainer.rank.reporter import Reporter

LOG = logging.getLogger("trainer")

PAUSES_S = (0.5, 1.0, 2.0)
"""Between the tries of the last save. Their sum is well below the grace period of a stopped job."""
MOST_STEP_TIMES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveReport:
    """The cost of a complete checkpoint."""

    step: int
    num_bytes: int
    """Sum over the files of all ranks."""
    block_s: float
    """Time that training was paused."""
    write_s: float
    """Time from the start of the save until it was complete."""
    slowdown: float | None
    """Median duration of the steps during the save, divided by that of the steps before it; None
    if no step ran during the save."""

    def __str__(self) -> str:
        size = f"{self.num_bytes / 2**20:,.1f} MiB in {self.write_s:.2f} s"
        slower = "" if self.slowdown is None else f", steps took {self.slowdown:.2f} x as long"
        return f"{size}, training paused for {self.block_s:.3f} s{slower}"


class CheckpointNotSaved(RuntimeError):
    """Raised on every rank, whichever of them failed to write. The diagnosis knows this name, and
    names no rank as the culprit."""


class Checkpoints:
    """Saves the checkpoints of a job, as one rank.

    All ranks call each method at the same step.
    """

    def __init__(
        self,
        folder: Path,
        state: TrainingState,
        spec: CheckpointSpec,
        reporter: Reporter,
        resumed: Resumed = AT_START,
        before_commit: Callable[[], None] = lambda: None,
    ) -> None:
        """
        Args:
            resumed: how far earlier attempts came.
            before_commit: called on rank 0 before a checkpoint becomes complete, maybe in another
                thread. An OSError makes the save fail.
        """
        self.last: SaveReport | None = None
        """The last complete checkpoint."""
        self.memory: MemoryCheckpoints | None = None
        """Background saves write from its slots. None: from a buffer of their own."""
        self._folder = folder
        self.state = state
        self._spec = spec
        self._reporter = reporter
        self._env = state.ranks.env
        self._auto_interval: AutoInterval | None = None
        self._schedule = Schedule(spec.every_steps).after(resumed)
        if spec.every == "auto":
            self._auto_interval = AutoInterval(self._env)
            every = self._auto_interval.every or spec.every_steps
            self._schedule = Schedule(every, since=resumed.saved)
        self._proposed: Proposal | None = None
        self._proposed_from: SaveReport | None = None
        # A background save runs collectives beside those of training, so it needs its own group.
        self._target = Target(
            folder=folder,
            env=state.ranks.env,
            group=dist.new_group(backend="gloo", group_desc="checkpoint"),
            before_commit=before_commit,
        )
        self._buffers = HostBuffers()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint", initializer=give_way)
        self._pending: Future[Outcome] | None = None
        self._pace: Pace | None = None
        """Of the pending save; None: it is written as fast as possible."""
        self._steps_between: deque[float] = deque(maxlen=MOST_STEP_TIMES)
        """Seconds of the last steps that ran while no save was being written."""
        self._steps_during: list[float] = []
        """Seconds of the steps that ran during the last background save."""
        self._writing = False
        """A save was being written when the current step began."""

    def ends_at(self, step: int) -> None:
        """The job ends with `step`, which is always saved."""
        self._schedule = replace(self._schedule, last=step)

    def due(self, step: int) -> bool:
        """Whether a periodic save is due after `step`."""
        return self._schedule.due(step)

    def ask(self, step: int) -> None:
        """A checkpoint is asked for, so the save after `step` is due, unless one has just begun:
        the agents of other hosts may have passed the request on a step later."""
        self._hurry()
        self._schedule = self._schedule.asked(step)

    @property
    def failed(self) -> bool:
        """This rank knows that the background save failed. The totals of the next step tell all
        other ranks, so that all retry at the same step."""
        pending = self._pending
        if pending is None or not pending.done():
            return False
        return pending.exception() is not None or bool(pending.result().why)

    @property
    def proposed_every(self) -> int:
        """New checkpoint interval in steps that rank 0 proposes; 0: unchanged, or another rank. The
        totals of the next step tell all ranks."""
        return 0 if self._proposed is None else self._proposed.every

    def after_step(self, step: int, step_s: float, some_failed: bool, every: int = 0) -> None:
        """Handle what the totals of `step` said about saves.

        Args:
            step_s: duration of the step.
            some_failed: on at least one rank the background save failed.
            every: new interval that rank 0 proposed; 0: unchanged.
        """
        (self._steps_during if self._writing else self._steps_between).append(step_s)
        self._writing = self._pending is not None and not self._pending.done()
        if self._writing and self._schedule.is_half_over(step):
            self._hurry()
        if every:
            self._change(step, every)
        if some_failed:
            # Some ranks may still be writing. The phase tells the agent that this wait is no hang.
            self._reporter.beat("checkpoint")
            self.wait()
            self._try_again(step)
            self._reporter.beat("train")
        if not self._writing:
            self._propose_interval()

    def _propose_interval(self) -> None:
        """Rank 0 proposes an interval from the cost of the last complete save, once per save."""
        last = self.last
        if self._auto_interval is None or self._env.rank or last in (None, self._proposed_from):
            return
        self._proposed_from = last
        self._proposed = self._auto_interval.propose(
            self._schedule.every,
            last.block_s,
            last.write_s,
            self._steps_during,
            self._steps_between,
            remembers=self.memory is not None,
        )

    def _change(self, step: int, every: int) -> None:
        old, self._schedule = self._schedule.every, replace(self._schedule, every=every)
        if self._proposed is not None:
            why, self._proposed = self._proposed.why, None
            self._reporter.interval_changed(step, old, every, why)
            LOG.info("changed the checkpoint interval from %d to %d steps: %s", old, every, why)

    def save(self, step: int) -> None:
        """A periodic save. A failure is only logged, because older checkpoints still exist."""
        begun = time.perf_counter()
        self.wait()
        # If saves follow each other without a pause, there is no other moment.
        self._propose_interval()
        is_urgent = self._schedule.is_urgent(step)
        self._schedule = self._schedule.begun(step)
        if self._spec.async_:
            # Training waits for this copy only.
            copied, self._pace = self._copied(step)
            if is_urgent:
                self._hurry()
            block_s = time.perf_counter() - begun
            self._steps_during, self._writing = [], True
            self._pending = self._thread.submit(self._write, copied, step, begun, block_s)
            return
        outcome = self._write(self.state.snapshot(step), step, begun)
        if outcome.why:
            self._try_again(step)

    def _copied(self, step: int) -> tuple[dict[str, Any], Pace | None]:
        """A copy of the state after `step`, which stays as it is until the next one is made, and
        the pace to write it with."""
        copied = None if self.memory is None else self.memory.save_for_disk(step)
        if copied is not None:
            # Most failures cost no more if the disk has the step some seconds later.
            return copied, Pace()
        return self._buffers.copy(self.state.snapshot(step)), None

    def _hurry(self) -> None:
        if self._pace is not None:
            self._pace.hurry()

    def save_or_raise(self, step: int) -> None:
        """The last save of a run; returns when it is complete.

        Raises:
            CheckpointNotSaved: on every rank, if all tries failed.
        """
        self.wait()
        for pause_s in (*PAUSES_S, None):
            outcome = self._write(self.state.snapshot(step), step, time.perf_counter())
            if not outcome.why:
                return
            if pause_s is not None:
                threading.Event().wait(pause_s)
        raise CheckpointNotSaved(
            f"the checkpoint of step {step} failed {len(PAUSES_S) + 1} times: {outcome.why}"
        )

    def close(self) -> None:
        """Called when the rank leaves its attempt. A save that is in progress has failed by then,
        because its collectives are broken off."""
        self._hurry()
        self._thread.shutdown()
        if self.memory is not None:
            self.memory.close()

    def wait(self) -> None:
        """Return when no save is in progress. A failure was reported when it happened."""
        if self._pending is not None:
            self._hurry()
            self._pending.exception()
            self._pending = None

    def _write(
        self, snapshot: dict[str, Any], step: int, begun: float, blocked_s: float | None = None
    ) -> Outcome:
        """Write the checkpoint and report the outcome. `blocked_s` is set for a background save:
        the time that training was paused."""
        pace = None if blocked_s is None else self._pace
        outcome = write_on_all_ranks(snapshot, step, self._target, pace)
        if outcome.why:
            self._report_failure(step, outcome.why)
        else:
            self._report_complete(step, outcome.num_bytes, time.perf_counter() - begun, blocked_s)
        return outcome

    def _report_complete(
        self, step: int, num_bytes: int, write_s: float, blocked_s: float | None
    ) -> None:
        during = list(self._steps_during) if blocked_s is not None else []
        before = self._steps_between
        self.last = SaveReport(
            step=step,
            num_bytes=num_bytes,
            block_s=write_s if blocked_s is None else blocked_s,
            write_s=write_s,
            slowdown=median(during) / median(before) if during and before else None,
        )
        if self._env.rank == 0:
            self._reporter.saved(step)
            LOG.info("checkpoint of step %d is complete: %s", step, self.last)
            try:
                remove_old(self._folder, step, self._spec.keep, self._spec.keep_every)
            except OSError as exc:
                LOG.warning("failed to remove old checkpoints: %s", exc)

    def _report_failure(self, step: int, why: str) -> None:
        if self._env.rank == 0:
            self._reporter.save_failed(step, why)
            LOG.warning("failed to save the checkpoint of step %d: %s", step, why)

    def _try_again(self, step: int) -> None:
        self._schedule = self._schedule.failed(step)
        if self._env.rank == 0:
            LOG.info("training continues; next save after step %d", self.next_due(step))

    def next_due(self, step: int) -> int:
        """The first step after `step` at which a save is due."""
        return self._schedule.next_due(step)
