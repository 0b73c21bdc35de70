"""The training loop: steps, and the work between two steps."""

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from orchestrator.contract.files import exit_codes
from orchestrator.contract.files.trainer_config import TrainingConfig
from trainer.checkpoint.memory.saves import MemoryCheckpoints
from trainer.checkpoint.save import Checkpoints
from trainer.evaluate import Evaluator
from trainer.guard import Skips, Spikes, loss_spike_error, not_finite_error
from trainer.measure.fullest import Fullest
from trainer.measure.metrics import StepMetrics
from trainer.measure.profiling import Profiling
from trainer.measure.records import Records, StepRecord
from trainer.measure.timing import Part
from trainer.optimizer import lr_at
from trainer.rank.drills import FaultTarget, drills_due, inject_fault
from trainer.rank.host.garbage import collect_at, collected_by_step
from trainer.rank.ranks import Ranks, barrier, shorten_timeouts, train_timeout
from trainer.rank.runtime import Runtime
from trainer.step import News, Stepper, Totals

LOG = logging.getLogger("trainer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    config: TrainingConfig
    ranks: Ranks
    stepper: Stepper
    run_ahead: int
    """Steps that are queued on the device before the result of the oldest is read; 0: none."""
    skips: Skips
    spikes: Spikes
    checkpoints: Checkpoints
    evaluator: Evaluator | None
    profiling: Profiling
    fullest: Fullest
    records: Records | None
    """None except on rank 0."""
    peak_tokens_per_second: float | None
    """Tokens per second at the devices' peak FLOPS; None if the peak is unknown."""
    runtime: Runtime

    @property
    def memory(self) -> MemoryCheckpoints | None:
        """None: no checkpoints in the memory of the hosts."""
        return self.checkpoints.memory

    @property
    def is_unstable(self) -> bool:
        """The last step was bad; several bad steps in a row end the job."""
        return self.skips.bad_in_a_row > 0 or self.spikes.high_in_a_row > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuedStep:
    step: int
    begun: float
    read: Callable[[], Totals]
    """Waits for the device."""


@dataclass(slots=True)
class Ahead:
    """The steps whose results are not read yet, and what the last one that was read says."""

    target: FaultTarget
    queued: deque[QueuedStep] = field(default_factory=deque)
    read_at: float = -math.inf
    """When the last result was read."""
    stop: bool = False
    """A rank was asked to stop."""
    on_disk: bool = False
    """And to leave a checkpoint on the disk."""


def train(job: Training, done: int) -> int:
    """Train the steps after `done`; returns the exit code.

    Raises:
        NotFinite: the loss or the gradient was not finite for too many steps in a row.
        LossSpike: the loss was too high for too many steps in a row.
    """
    last = job.config.train.steps
    if done >= last:
        # An immediate exit would break connections that peers are still opening.
        barrier()
        if job.ranks.env.rank == 0:
            LOG.info("nothing left to do: %d of %d steps are done", done, last)
    code = exit_codes.OK
    ahead = Ahead(FaultTarget(job.stepper.parameters, job.stepper.batches.stall))
    with collected_by_step(kept=job.ranks.env.place is not None):
        for step in range(done + 1, last + 1):
            _queue(job, step, ahead, first=step == done + 1)
            while ahead.queued and _must_read(job, step, ahead, first=step == done + 1):
                _finish(job, ahead)
            if ahead.queued:
                continue
            _save_if_due(job, step, ahead)
            _remember_if_due(job, step)
            if ahead.stop and step < last:
                code = exit_codes.CHECKPOINTED
                break
    job.profiling.finish()
    job.runtime.reporter.beat("exit")
    return code


def _queue(job: Training, step: int, ahead: Ahead, *, first: bool) -> None:
    """Run `step`, or queue it on the device."""
    reporter = job.runtime.reporter
    reporter.unread = len(ahead.queued)
    for drill in drills_due(job.runtime.drills, job.ranks.env, step):
        inject_fault(drill, reporter, ahead.target)
    ahead.target.slow_down()
    collect_at(step)
    if first:
        reporter.beat("compile" if job.config.train.compile else "train")
    job.profiling.before(step)
    begun = time.perf_counter()
    run = job.stepper.queue if job.run_ahead else job.stepper.read_at_once
    read = run(step, lr_at(step, job.config.train), job.runtime.stop, _news(job))
    ahead.queued.append(QueuedStep(step=step, begun=begun, read=read))
    job.profiling.after(step)


def _news(job: Training) -> News:
    disk, memory = job.checkpoints, job.memory
    news = News(save_failed=disk.failed, every=disk.proposed_every)
    return news if memory is None else memory.news(news)


def _must_read(job: Training, step: int, ahead: Ahead, *, first: bool) -> bool:
    """Whether the oldest queued step must be read before the step after `step` is queued.

    All ranks decide alike: the answer depends on results that all have read.
    """
    if len(ahead.queued) > job.run_ahead:
        return True
    last = job.config.train.steps
    evaluate = job.evaluator is not None and job.evaluator.due(step, last)
    # What follows the step depends on all results, and the first step may take long to compile.
    save = job.checkpoints.due(step) or (job.memory is not None and job.memory.due(step))
    return first or step == last or ahead.stop or evaluate or save


def _finish(job: Training, ahead: Ahead) -> None:
    """Read the result of the oldest queued step, and do all that follows from it."""
    queued = ahead.queued.popleft()
    step, totals = queued.step, queued.read()
    now = time.perf_counter()
    # A step that was queued early starts on the device when the one before it ends.
    step_s = now - max(queued.begun, ahead.read_at)
    if ahead.read_at == -math.inf:
        # The first step may compile for a long time; later ones get the shorter timeout.
        shorten_timeouts(train_timeout(job.config.pause_s))
    ahead.read_at, ahead.target.step_s = now, step_s
    ahead.stop = ahead.stop or totals.stop
    ahead.on_disk = ahead.on_disk or (totals.stop and totals.stop_on_disk)
    newest = ahead.queued[-1].step if ahead.queued else step
    job.checkpoints.after_step(newest, step_s, totals.save_failed, totals.every)
    if totals.save:
        job.runtime.stop.save = False
        job.checkpoints.ask(newest)
    if job.memory is not None:
        job.memory.after_step(step_s, totals)
    _count_skips(job, step, totals)
    if job.fullest.is_due(step):
        with job.stepper.watch.not_own_work():
            job.fullest.compare()
    seconds = job.stepper.watch.pop_seconds()
    metrics = _measure(job, step, totals, step_s, seconds)
    _fail_if_hopeless(job, metrics, totals)
    _beat(job, metrics, seconds.get("own"))
    _record(job, _evaluate_if_due(job, metrics, ahead.stop), totals)


def _count_skips(job: Training, step: int, totals: Totals) -> None:
    if totals.finite:
        job.skips.learned()
        return
    if totals.tokens:
        job.skips.bad(step)
        why = f"{_what(totals)} not finite"
    else:
        job.skips.empty()
        why = "the batch has no token to learn"
    if job.ranks.env.rank == 0:
        LOG.warning("skipped the update of step %d: %s", step, why)


def _what(totals: Totals) -> str:
    if not math.isfinite(totals.loss):
        return f"the loss is {totals.loss},"
    if not math.isfinite(totals.z_loss):
        return f"the z-loss is {totals.z_loss},"
    return f"the loss is {totals.loss:.4f} and the gradient's norm {totals.grad_norm},"


def _measure(
    job: Training, step: int, totals: Totals, step_s: float, seconds: Mapping[Part, float]
) -> StepMetrics:
    train = job.config.train
    tokens_per_second = job.stepper.tokens_per_step / step_s
    peak = job.peak_tokens_per_second
    return StepMetrics(
        attempt=job.ranks.env.attempt,
        step=step,
        loss=totals.loss,
        z_loss=None if train.z_loss is None else totals.z_loss,
        grad_norm=totals.grad_norm,
        lr=lr_at(step, train),
        tokens_per_second=tokens_per_second,
        mfu=None if peak is None else tokens_per_second / peak,
        step_s=step_s,
        data_s=seconds.get("data", 0.0),
        passes_s=seconds.get("passes", 0.0),
        forward_s=seconds.get("forward"),
        backward_s=seconds.get("backward"),
        optimizer_s=seconds.get("optimizer", 0.0),
        checkpoint_s=seconds.get("checkpoint", 0.0),
        fullest_memory_bytes=job.fullest.memory_bytes,
        fullest_rank=job.fullest.rank,
        skipped=job.skips.total,
        time=job.runtime.clock(),
    )


def _fail_if_hopeless(job: Training, metrics: StepMetrics, totals: Totals) -> None:
    limit = job.config.train.max_bad_steps
    if job.skips.bad_in_a_row >= limit:
        _record(job, metrics, totals)
        names, since = totals.bad_gradients, job.skips.since
        raise not_finite_error(metrics.step, since, limit, _what(totals), names)
    spec = job.config.train.spike
    if spec is None:
        return
    job.spikes.seen(metrics.step, totals.loss, spec)
    if job.spikes.high_in_a_row >= spec.steps:
        _record(job, metrics, totals)
        highest = job.spikes.limit(spec)
        assert highest is not None  # a loss was above it
        raise loss_spike_error(metrics.step, job.spikes.since, totals.loss, highest, spec)


def _beat(job: Training, metrics: StepMetrics, own_s: float | None) -> None:
    job.runtime.reporter.step = metrics.step
    job.runtime.reporter.beat(
        "train", loss=metrics.loss, tokens_per_second=metrics.tokens_per_second, own_s=own_s
    )


def _evaluate_if_due(job: Training, metrics: StepMetrics, stop_requested: bool) -> StepMetrics:
    """`metrics` with the result of an evaluation, if one is due."""
    evaluator, last = job.evaluator, job.config.train.steps
    # After a request to stop, the grace period is needed for the checkpoint.
    if evaluator is None or stop_requested or not evaluator.due(metrics.step, last):
        return metrics
    with job.stepper.watch.not_own_work():
        found = evaluator.run()
    job.runtime.reporter.beat("train")
    return replace(metrics, eval_loss=found.loss, eval_s=found.seconds)


def _record(job: Training, metrics: StepMetrics, totals: Totals) -> None:
    if job.records is None:
        return
    record = StepRecord(metrics=metrics, read=totals.read)
    if not job.records.full:
        job.records.add(record)
        return
    # Storage has been hanging for many steps. The phase tells the agent what this rank waits for.
    job.runtime.reporter.beat("write")
    with job.stepper.watch.not_own_work():
        job.records.add(record)
    job.runtime.reporter.beat("train")


def log_step(metrics: StepMetrics, last: int) -> None:
    """Write the line of a step to the log. `last`: steps of the job."""
    LOG.info(
        "step %d/%d loss %.4f%s grad_norm %.3g lr %.2e tokens/s %.0f",
        metrics.step,
        last,
        metrics.loss,
        "" if metrics.eval_loss is None else f" eval_loss {metrics.eval_loss:.4f}",
        metrics.grad_norm,
        metrics.lr,
        metrics.tokens_per_second,
    )


def _save_if_due(job: Training, step: int, ahead: Ahead) -> None:
    last = step == job.config.train.steps
    # The last save of a run has no later one to make up for it, so it must succeed.
    must_succeed = ahead.stop or last
    if not must_succeed and not job.checkpoints.due(step):
        return
    if not last and not ahead.on_disk and _stays_in_memory(job, step):
        return
    if not must_succeed and job.is_unstable:
        # A rollback goes to the newest checkpoint, so it must be from before the bad steps.
        if job.ranks.env.rank == 0:
            LOG.warning("skipping the checkpoint of step %d: training may be unstable", step)
        return
    job.runtime.reporter.beat("checkpoint")
    with job.stepper.watch.not_own_work(), job.stepper.watch.host_part("checkpoint"):
        if must_succeed:
            job.checkpoints.save_or_raise(step)
        else:
            job.checkpoints.save(step)
    job.runtime.reporter.beat("train")


def _stays_in_memory(job: Training, step: int) -> bool:
    """At a stop: whether the hosts and their partners have the step, so that the next attempt
    starts from memory. The disk gets its checkpoints at their own steps, as always."""
    if job.memory is None or job.is_unstable or job.checkpoints.due(step):
        return False
    job.runtime.reporter.beat("checkpoint")
    with job.stepper.watch.not_own_work(), job.stepper.watch.host_part("checkpoint"):
        job.checkpoints.wait()
        return job.memory.save_for_stop(step)


def _remember_if_due(job: Training, step: int) -> None:
    memory = job.memory
    # A restart must not begin amid bad steps: those are repeated from before the first.
    if memory is None or job.is_unstable or not memory.due(step):
        return
    with job.stepper.watch.not_own_work(), job.stepper.watch.host_part("checkpoint"):
        memory.save(step)
