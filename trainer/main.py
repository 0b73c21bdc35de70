"""One rank's training from beginning to end: this file is the trainer's table of contents."""

import json
from pathlib import Path

import torch

from orchestrator.contract.rundir import RunDir
from orchestrator.contract.training import TrainingConfig
from trainer.checkpoint.resume import find_checkpoint, resume
from trainer.checkpoint.save import Checkpoints
from trainer.checkpoint.state import Origin, Stream, TrainingState, trained_parameters
from trainer.data.batches import Batches
from trainer.data.corpus import NUM_BYTES, Corpus, find_corpus
from trainer.loop import Training, train
from trainer.loss import TokenLoss
from trainer.metrics import MetricsFile
from trainer.model.build import build_stages, check_model, read_model_config
from trainer.model.decoder import Decoder, StageSlice
from trainer.model.fresh import allocate
from trainer.model.weights import find_weights, first_weights
from trainer.optimizer import build_optimizer
from trainer.outside import Outside
from trainer.parallel.activation import apply_activation_checkpointing
from trainer.parallel.context import local_positions
from trainer.parallel.data import apply_data_parallel
from trainer.parallel.tensor import apply_tensor_parallel, check_tensor_parallel
from trainer.passes import WholeModel
from trainer.ranks import Ranks, arrange, process_group, shared_from_first
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
    stages = build_model(config, ranks)
    weights = find_weights(config.model)
    found = find_checkpoint(run.checkpoints, ranks, config.checkpoint.verify)
    for stage in stages:
        parallelise(stage, config, ranks)
        allocate(stage, ranks.device)
        stage.place(batches.positions_T.unsqueeze(0).to(ranks.device))
    first_weights(stages, weights, config.train.seed, resumed=found.folder is not None)
    parameters = [p for stage in stages for p in stage.parameters()]
    optimizer = build_optimizer(parameters, config.train.optimizer)
    state = TrainingState(
        parameters=trained_parameters(stages),
        optimizer=optimizer,
        stream=stream_of(config, batches.corpus),
        origin=origin_of(config),
        ranks=ranks,
    )
    done = resume(found, state, outside.reporter)
    tokens_per_step = config.train.global_batch_size * config.data.sequence_length
    loss = TokenLoss(tokens_per_step // (config.mesh.data_parallel * config.mesh.cp), ranks.device)
    stepper = Stepper(
        parameters=parameters,
        passes=WholeModel(stages[0], loss, config.mesh.tp > 1),
        optimizer=optimizer,
        batches=batches,
        ranks=ranks,
        tokens_per_step=tokens_per_step,
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


def origin_of(config: TrainingConfig) -> Origin:
    tokenizer = config.data.tokenizer
    return Origin(
        config=json.loads(read_model_config(config.model).to_json_string(use_diff=False)),
        tokenizer=str(Path(tokenizer).resolve()) if Path(tokenizer).is_dir() else tokenizer,
    )
