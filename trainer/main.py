"""One rank's training from beginning to end: this file is the trainer's table of contents."""

from pathlib import Path

import torch

from orchestrator.contract.rundir import RunDir
from orchestrator.contract.training import TrainingConfig
from trainer.checkpoint.resume import resume
from trainer.checkpoint.save import Checkpoints
from trainer.checkpoint.state import Stream, TrainingState
from trainer.data.batches import Batches
from trainer.data.corpus import NUM_BYTES, Corpus, find_corpus
from trainer.loop import Training, train
from trainer.loss import TokenLoss
from trainer.metrics import MetricsFile
from trainer.model.adapters import add_adapters, base_of, draw_adapters, trained
from trainer.model.build import build_stages, check_model, read_model_config
from trainer.model.decoder import Decoder, StageSlice
from trainer.model.float8 import apply_float8, scale_after_steps
from trainer.model.fresh import allocate, draw_weights
from trainer.model.quantize import fill_quantised, quantise
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
    for stage in stages:
        parallelise(stage, config, ranks)
        allocate(stage, ranks.device)
        stage.place(batches.positions_T.unsqueeze(0).to(ranks.device))
        fill(stage, config)
    parameters = trained(stages)
    optimizer = build_optimizer(parameters, config.train.optimizer)
    if config.train.float8:
        scale_after_steps(stages, optimizer)
    state = TrainingState(stages, optimizer, stream_of(config, batches.corpus), ranks)
    done = resume(run.checkpoints, state, outside.reporter)
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
    stages = build_stages(values, [StageSlice(0, layers, layers)])
    for stage in stages:
        adapt(stage, config, ranks)
    return stages


def adapt(decoder: Decoder, config: TrainingConfig, ranks: Ranks) -> None:
    """Change what the linear layers are made of, while they are whole and without storage."""
    lora = config.model.lora
    if config.train.float8:
        apply_float8(decoder, ranks.device, config)
    if lora is not None:
        add_adapters(decoder, lora)
        if lora.quantize == "nf4":
            quantise(decoder, config.mesh.dp_shard * config.mesh.cp, ranks.device)


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


def fill(decoder: Decoder, config: TrainingConfig) -> None:
    """First weights."""
    seed = config.train.seed
    draw_weights(decoder, seed)
    draw_adapters(decoder, seed)
    fill_quantised(decoder, lambda weights: draw_weights(weights, seed))


def stream_of(config: TrainingConfig, corpus: Corpus) -> Stream:
    return Stream(
        seed=config.train.seed,
        global_batch_size=config.train.global_batch_size,
        sequence_length=config.data.sequence_length,
        data=corpus.fingerprint,
        base=base_of(config.model),
    )
