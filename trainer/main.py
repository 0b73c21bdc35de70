"""One rank's training from beginning to end: this file is the trainer's table of contents."""

from pathlib import Path
from typing import cast

import torch

from orchestrator.contract.rundir import RunDir
from orchestrator.contract.training import TrainingConfig
from trainer.checkpoint.resume import resume
from trainer.checkpoint.save import Checkpoints
from trainer.checkpoint.state import Stream, TrainingState
from trainer.data.batches import Batches
from trainer.data.corpus import NUM_BYTES, Corpus, find_corpus
from trainer.evaluate import EvaluationData, Evaluator
from trainer.flops import flops_per_token, job_peak
from trainer.loop import Training, train
from trainer.loss import TokenLoss
from trainer.model.build import build_stages, check_model, read_model_config
from trainer.model.decoder import Decoder, StageSlice
from trainer.model.fresh import allocate, draw_weights
from trainer.optimizer import build_optimizer
from trainer.outside import Outside
from trainer.parallel.activation import apply_activation_checkpointing
from trainer.parallel.context import local_positions
from trainer.parallel.data import apply_data_parallel
from trainer.parallel.tensor import apply_tensor_parallel, check_tensor_parallel
from trainer.passes import Passes, WholeModel
from trainer.profiling import Profiling
from trainer.ranks import Ranks, arrange, process_group, shared_from_first
from trainer.report import open_report
from trainer.step import Stepper
from trainer.timing import stopwatch


def main(config: TrainingConfig, outside: Outside) -> int:
    """Train; returns the exit code of the process."""
    with process_group(outside.env):
        ranks = arrange(config.mesh, outside.env)
        return train_on(ranks, config, outside)


def train_on(ranks: Ranks, config: TrainingConfig, outside: Outside) -> int:
    torch.manual_seed(config.train.seed + ranks.env.rank)
    run = RunDir(Path(config.out))
    batches = open_data(config, ranks)
    stages = build_model(config, ranks)
    for stage in stages:
        parallelise(stage, config, ranks)
        allocate(stage, ranks.device)
        stage.place(batches.positions_T.unsqueeze(0).to(ranks.device))
        draw_weights(stage, config.train.seed)
    parameters = [pair for stage in stages for pair in stage.plain_parameters()]
    optimizer = build_optimizer([p for _, p in parameters], config.train.optimizer)
    state = TrainingState(stages, optimizer, stream_of(config, batches.corpus), ranks)
    done = resume(run.checkpoints, state, outside.reporter)
    tokens_per_step = config.train.global_batch_size * config.data.sequence_length
    tokens_per_rank = tokens_per_step // (config.mesh.data_parallel * config.mesh.cp)
    loss = TokenLoss(tokens_per_rank, ranks.device, config.train.z_loss)
    watch = stopwatch(ranks.device)
    passes = WholeModel(stages[0], loss, config.mesh.tp > 1, watch)
    stepper = Stepper(
        parameters=parameters,
        passes=passes,
        optimizer=optimizer,
        batches=batches,
        ranks=ranks,
        tokens_per_step=tokens_per_step,
        grad_clip=config.train.grad_clip,
        watch=watch,
    )
    checkpoints = Checkpoints(run.checkpoints, state, config.checkpoint, outside.reporter)
    job = Training(
        config=config,
        ranks=ranks,
        stepper=stepper,
        skips=state.skips,
        checkpoints=checkpoints,
        evaluator=evaluator_of(config, batches, passes, stages, outside),
        profiling=profiling_of(config, ranks, outside),
        # One writer: the totals are the same on every rank.
        report=open_report(run, config.train, done) if ranks.env.rank == 0 else None,
        peak_tokens_per_second=peak_tokens_per_second(config, stages, ranks),
        outside=outside,
    )
    return train(job, done)


def open_data(config: TrainingConfig, ranks: Ranks) -> Batches:
    batch = config.train.global_batch_size
    # Rank 0 lists the files for all, so that all have the same list.
    corpus = shared_from_first(lambda: find_corpus(config.data, batch))
    return Batches(
        corpus=corpus,
        seed=config.train.seed,
        global_batch_size=batch,
        micro_batch_size=config.micro_batch_size,
        data_parallel=config.mesh.data_parallel,
        data_rank=ranks.data_rank,
        positions_T=local_positions(config.data.sequence_length),
        device=ranks.device,
    )


def build_model(config: TrainingConfig, ranks: Ranks) -> list[Decoder]:
    """The stages of this rank, on the meta device."""
    values = read_model_config(config.model)
    check_model(values, NUM_BYTES, config.data.sequence_length)
    if config.mesh.tp > 1:
        check_tensor_parallel(values, config.mesh.tp, config.data.sequence_length)
    layers = values.num_hidden_layers
    return build_stages(values, [StageSlice(0, layers, layers)])


def parallelise(decoder: Decoder, config: TrainingConfig, ranks: Ranks) -> None:
    """Inside out: tensors are cut, layers wrapped and compiled, and what is left is sharded."""
    if config.mesh.tp > 1:
        apply_tensor_parallel(decoder, ranks.mesh["tp"])
    train = config.train
    apply_activation_checkpointing(decoder, train.activation_checkpointing, train.checkpoint_every)
    if train.compile:
        for layer in decoder.layers.values():
            layer.compile()
    apply_data_parallel(decoder, ranks.mesh, train.dtype)


def stream_of(config: TrainingConfig, corpus: Corpus) -> Stream:
    return Stream(
        seed=config.train.seed,
        global_batch_size=config.train.global_batch_size,
        sequence_length=config.data.sequence_length,
        data=corpus.fingerprint,
    )


def evaluator_of(
    config: TrainingConfig,
    batches: Batches,
    passes: Passes,
    stages: list[Decoder],
    outside: Outside,
) -> Evaluator | None:
    if config.train.eval_every is None:
        return None
    return Evaluator(
        every=config.train.eval_every,
        sequences=config.train.eval_sequences,
        data=cast(EvaluationData, batches),
        passes=passes,
        stages=stages,
        device=batches.device,
        reporter=outside.reporter,
    )


def profiling_of(config: TrainingConfig, ranks: Ranks, outside: Outside) -> Profiling | None:
    spec = config.train.profile
    if spec is None or ranks.env.rank not in spec.ranks:
        return None
    folder = RunDir(Path(config.out)).profiles(ranks.env.attempt)
    return Profiling(spec, folder, ranks.device, outside.reporter)


def peak_tokens_per_second(
    config: TrainingConfig, stages: list[Decoder], ranks: Ranks
) -> float | None:
    """What the devices would do at their peak; all ranks must call it."""
    each = flops_per_token(stages, ranks, config.data.sequence_length)
    peak = job_peak(ranks, config.train.dtype, config.train.device_tflops)
    return None if peak is None else peak / each
