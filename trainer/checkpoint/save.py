"""When checkpoints are written, and what becomes of a save that fails.

Each rank writes its shards, in the background where the spec says so, one save at a time. A
periodic save that fails costs a warning and is tried again some steps later; the last one of a run
is tried a few times on the spot.
"""

import logging
import threading
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from orchestrator.contract.spec.job_spec import CheckpointSpec
from trainer.checkpoint.collective import Outcome, write_together
from trainer.checkpoint.commit import remove_old
from trainer.checkpoint.pace import Pace, Proposal
from trainer.checkpoint.schedule import Schedule
from trainer.checkpoint.state import TrainingState
from trainer.rank.emit import Reporter

LOG = logging.getLogger("trainer")

PAUSES_S = (0.5, 1.0, 2.0)
"""Between the tries of a save that matters; well within the grace that a stopped job has."""
MOST_STEP_TIMES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveReport:
    """What a complete checkpoint cost."""

    step: int
    num_bytes: int
    """Of all ranks' files."""
    block_s: float
    """How long training stood still for it."""
    write_s: float
    """From its beginning until it was complete."""
    slowdown: float | None
    """Median length of the steps that were made meanwhile, over that of those before; None where
    there were none."""

    def __str__(self) -> str:
        size = f"{self.num_bytes / 2**20:,.1f} MiB in {self.write_s:.2f} s"
        slower = "" if self.slowdown is None else f", steps took {self.slowdown:.2f} x meanwhile"
        return f"{size}, training stood still for {self.block_s:.3f} s{slower}"


class Checkpoints:
    """The checkpoint folder of a job, as one rank writes to it.

    Every method is called by all ranks at the same step.
    """

    def __init__(
        self,
        folder: Path,
        state: TrainingState,
        spec: CheckpointSpec,
        reporter: Reporter,
        done: int = 0,
    ) -> None:
        """`done` steps were made before."""
        self.last: SaveReport | None = None
        """The last one that was complete."""
        self._folder = folder
        self._state = state
        self._spec = spec
        self._reporter = reporter
        self._env = state.ranks.env
        self._pace: Pace | None = None
        self._schedule = Schedule(spec.every_steps)
        if spec.every == "auto":
            self._pace = Pace(self._env)
            self._schedule = Schedule(self._pace.every or spec.every_steps, since=done)
        self._proposed: Proposal | None = None
        self._weighed: SaveReport | None = None
        # A save in the background talks while training does: it needs a group of its own.
        self._group = dist.new_group(backend="gloo", group_desc="checkpoint")
        self._stager = DefaultStager(_staging(state.ranks.device))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[Outcome] | None = None
        self._before: deque[float] = deque(maxlen=MOST_STEP_TIMES)
        self._meanwhile: list[float] = []
        self._writing = False
        """A save was being written when the present step began."""

    def due(self, step: int) -> bool:
        """Whether a periodic save is to be made after `step`."""
        return self._schedule.due(step)

    @property
    def failed(self) -> bool:
        """This rank knows that the save in the background has failed; the others learn it in the
        totals of the next step, so that all of them try again at the same one."""
        pending = self._pending
        if pending is None or not pending.done():
            return False
        return pending.exception() is not None or bool(pending.result().why)

    @property
    def proposed_every(self) -> int:
        """What this rank wants to be the interval from the next step on, in steps; 0 for as it is.
        The first rank alone wants anything, and the totals of a step make it known to all."""
        return 0 if self._proposed is None else self._proposed.every

    def after_step(self, step: int, step_s: float, some_failed: bool, every: int = 0) -> None:
        """`step` took `step_s` seconds, and in it some rank may have told of a failed save, and the
        first one of another interval."""
        (self._meanwhile if self._writing else self._before).append(step_s)
        self._writing = self._pending is not None and not self._pending.done()
        if every:
            self._change(step, every)
        if some_failed:
            # Ranks whose own write is not over yet wait for it here, which is no hang.
            self._reporter.beat("checkpoint")
            self.wait()
            self._try_again(step)
            self._reporter.beat("train")
        if self._pace is not None and self._env.rank == 0 and not self._writing:
            self._weigh(self._pace)

    def _weigh(self, pace: Pace) -> None:
        """What the last complete save cost, once nothing is being written."""
        last = self.last
        if last is None or last is self._weighed:
            return
        self._weighed = last
        self._proposed = pace.propose(
            self._schedule.every, last.block_s, last.write_s, self._meanwhile, self._before
        )

    def _change(self, step: int, every: int) -> None:
        old, self._schedule = self._schedule.every, replace(self._schedule, every=every)
        if self._proposed is not None:
            why, self._proposed = self._proposed.why, None
            self._reporter.interval_changed(step, old, every, why)
            LOG.info("a checkpoint every %d steps from now on, before %d: %s", every, old, why)

    def save(self, step: int) -> None:
        """A periodic save; a failure is a warning, for the ones before it are still there."""
        begun = time.perf_counter()
        self.wait()
        self._schedule = self._schedule.begun(step)
        if self._spec.async_:
            # The copy is what training waits for. Its buffers are kept from one save to the next:
            # the first touch of fresh memory, or pinning it, takes longer than the copy itself.
            staged = self._stager.stage(self._state.snapshot(step))
            assert isinstance(staged, dict)  # and no Future: it is not staged in the background
            block_s = time.perf_counter() - begun
            self._meanwhile, self._writing = [], True
            self._pending = self._thread.submit(self._write, staged, step, begun, block_s)
            return
        outcome = self._write(self._state.snapshot(step), step, begun)
        if outcome.why:
            self._try_again(step)

    def save_for_sure(self, step: int) -> None:
        """A save whose outcome matters: returns when it is complete.

        Raises:
            RuntimeError: on every rank, when all tries failed.
        """
        self.wait()
        for pause_s in (*PAUSES_S, None):
            outcome = self._write(self._state.snapshot(step), step, time.perf_counter())
            if not outcome.why:
                return
            if pause_s is not None:
                threading.Event().wait(pause_s)
        raise RuntimeError(
            f"the checkpoint of step {step} failed {len(PAUSES_S) + 1} times: {outcome.why}"
        )

    def wait(self) -> None:
        """Return when no save is going on; its failure was told when it happened."""
        if self._pending is not None:
            self._pending.exception()
            self._pending = None

    def _write(
        self, snapshot: dict[str, Any], step: int, begun: float, blocked_s: float | None = None
    ) -> Outcome:
        """Write and tell what came of it; in the background, training stood still `blocked_s`."""
        outcome = write_together(snapshot, self._folder, step, self._env, self._group)
        if outcome.why:
            self._told_failure(step, outcome.why)
        else:
            self._told_complete(step, outcome.num_bytes, time.perf_counter() - begun, blocked_s)
        return outcome

    def _told_complete(
        self, step: int, num_bytes: int, write_s: float, blocked_s: float | None
    ) -> None:
        beside = list(self._meanwhile) if blocked_s is not None else []
        self.last = SaveReport(
            step=step,
            num_bytes=num_bytes,
            block_s=write_s if blocked_s is None else blocked_s,
            write_s=write_s,
            slowdown=median(beside) / median(self._before) if beside and self._before else None,
        )
        if self._env.rank == 0:
            self._reporter.saved(step)
            LOG.info("checkpoint of step %d is complete: %s", step, self.last)
            try:
                remove_old(self._folder, step, self._spec)
            except OSError as exc:
                LOG.warning("old checkpoints could not be removed: %s", exc)

    def _told_failure(self, step: int, why: str) -> None:
        if self._env.rank == 0:
            self._reporter.save_failed(step, why)
            LOG.warning("the checkpoint of step %d failed: %s", step, why)

    def _try_again(self, step: int) -> None:
        self._schedule = self._schedule.failed(step)
        if self._env.rank == 0:
            LOG.info("training goes on; the next save is tried after step %d", self.next_due(step))

    def next_due(self, step: int) -> int:
        """The first step after `step` at which a periodic save is due."""
        return self._schedule.next_due(step)


def _staging(device: torch.device) -> StagingOptions:
    cuda = device.type == "cuda"
    return StagingOptions(
        use_pinned_memory=cuda,
        use_shared_memory=False,
        # The next optimizer step would have to wait for a copy that goes on beside training.
        use_async_staging=False,
        use_non_blocking_copy=cuda,
    )
