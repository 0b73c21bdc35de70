"""One rank's training from beginning to end: this file is the trainer's table of contents."""

from pathlib import Path

import torch
from transformers import PreTrainedModel

from orchestrator.contract.rundir import RunDir
from orchestrator.contract.training import TrainingConfig
from trainer.activation import apply_activation_checkpointing
from trainer.checkpoint import Checkpoints
from trainer.data import Batches, Corpus, find_corpus
from trainer.loop import Training, train
from trainer.metrics import MetricsFile
from trainer.model import build_model, layers_of, materialise
from trainer.optimizer import build_optimizer
from trainer.outside import Outside
from trainer.parallel.data import apply_data_parallel
from trainer.parallel.tensor import apply_tensor_parallel
from trainer.ranks import Ranks, arrange, process_group, shared_from_first
from trainer.resume import resume
from trainer.state import Stream, TrainingState
from trainer.step import Stepper


def main(config: TrainingConfig, outside: Outside) -> int:
    """Train; returns the exit code of the process."""
    with process_group(outside.env):
        ranks = arrange(config.mesh, outside.env)
        return train_on(ranks, config, outside)


def train_on(ranks: Ranks, config: TrainingConfig, outside: Outside) -> int:
    torch.manual_seed(config.train.seed + ranks.env.rank)
    run = RunDir(Path(config.out))
    batches = open_data(config, ranks)
    model = build_model(config.model, config.data)
    parallelise(model, config, ranks)
    materialise(model, config.train.seed, ranks.device)
    optimizer = build_optimizer(model, config.train.optimizer)
    state = TrainingState(model, optimizer, stream_of(config, batches.corpus), ranks)
    done = resume(run.checkpoints, state, outside.reporter)
    stepper = Stepper(
        model=model,
        optimizer=optimizer,
        batches=batches,
        ranks=ranks,
        gradient_accumulation=config.gradient_accumulation,
        grad_clip=config.train.grad_clip,
    )
    checkpoints = Checkpoints(run.checkpoints, state, config.checkpoint, outside.reporter)
    # One writer: the totals are the same on every rank.
    metrics = MetricsFile(run.metrics) if ranks.env.rank == 0 else None
    return train(Training(config, ranks, stepper, checkpoints, metrics, outside), done)


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
    )


def parallelise(model: PreTrainedModel, config: TrainingConfig, ranks: Ranks) -> None:
    """Inside out: tensors are cut, layers wrapped and compiled, and what is left is sharded."""
    if config.mesh.tp > 1:
        apply_tensor_parallel(model, ranks.mesh["tp"], config.data.sequence_length)
    apply_activation_checkpointing(model, config.train.activation_checkpointing)
    if config.train.compile:
        for layer in layers_of(model):
            layer.compile()
    apply_data_parallel(model, ranks.mesh, config.train.dtype)


def stream_of(config: TrainingConfig, corpus: Corpus) -> Stream:
    return Stream(
        seed=config.train.seed,
        global_batch_size=config.train.global_batch_size,
        sequence_length=config.data.sequence_length,
        data=corpus.fingerprint,
    )
