"""The training loop: steps, and what happens between two of them."""

import logging
import time
from dataclasses import dataclass

from orchestrator.contract import exits
from orchestrator.contract.training import TrainingConfig
from trainer.checkpoint.save import Checkpoints
from trainer.drills import drills_due, suffer
from trainer.metrics import MetricsFile, StepMetrics
from trainer.optimizer import lr_at
from trainer.outside import Outside
from trainer.ranks import Ranks, memory_bytes
from trainer.step import Stepper

LOG = logging.getLogger("trainer")


@dataclass(frozen=True, slots=True)
class Training:
    """All that the loop works with."""

    config: TrainingConfig
    ranks: Ranks
    stepper: Stepper
    checkpoints: Checkpoints
    metrics: MetricsFile | None
    """On rank 0."""
    outside: Outside


def train(job: Training, done: int) -> int:
    """Do the steps after `done`; returns the exit code."""
    last = job.config.train.steps
    if done >= last and job.ranks.env.rank == 0:
        LOG.info("nothing left to do: %d of %d steps are done", done, last)
    for step in range(done + 1, last + 1):
        for drill in drills_due(job.outside.drills, job.ranks.env, step):
            suffer(drill, job.outside.reporter)
        if step == done + 1:
            job.outside.reporter.beat("compile" if job.config.train.compile else "train")
        asked_to_leave = _timed_step(job, step)
        _save_if_due(job, step, asked_to_leave)
        if asked_to_leave and step < last:
            job.outside.reporter.beat("exit")
            return exits.CHECKPOINTED
    job.outside.reporter.beat("exit")
    return exits.OK


def _timed_step(job: Training, step: int) -> bool:
    """Do one step and tell of it; True when some rank was asked to leave."""
    train = job.config.train
    begun = time.perf_counter()
    failed = job.checkpoints.failed
    totals = job.stepper.run(step, lr_at(step, train), job.outside.stop, failed)
    step_s = time.perf_counter() - begun
    job.checkpoints.after_step(step, step_s, totals.save_failed)
    tokens_per_second = train.global_batch_size * job.config.data.sequence_length / step_s
    job.outside.reporter.step = step
    job.outside.reporter.beat(
        "train",
        loss=totals.loss,
        tokens_per_second=tokens_per_second,
        memory_bytes=memory_bytes(job.ranks.device),
    )
    if job.metrics is not None:
        metrics = StepMetrics(
            attempt=job.ranks.env.attempt,
            step=step,
            loss=totals.loss,
            grad_norm=totals.grad_norm,
            lr=lr_at(step, train),
            tokens_per_second=tokens_per_second,
            step_s=step_s,
            time=job.outside.clock(),
        )
        job.metrics.append(metrics)
        _log_step(metrics, train.steps)
    return totals.stop


def _log_step(metrics: StepMetrics, steps: int) -> None:
    LOG.info(
        "step %d/%d loss %.4f grad_norm %.3g lr %.2e tokens/s %.0f",
        metrics.step,
        steps,
        metrics.loss,
        metrics.grad_norm,
        metrics.lr,
        metrics.tokens_per_second,
    )


def _save_if_due(job: Training, step: int, asked_to_leave: bool) -> None:
    for_sure = asked_to_leave or step == job.config.train.steps
    if not for_sure and not job.checkpoints.due(step):
        return
    job.outside.reporter.beat("checkpoint")
    if for_sure:
        job.checkpoints.save_for_sure(step)
    else:
        job.checkpoints.save(step)
    job.outside.reporter.beat("train")
