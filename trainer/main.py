"""One rank's training from beginning to end: this file is the trainer's table of contents."""

from pathlib import Path

import torch

from orchestrator.contract.env import RankEnv
from orchestrator.contract.rundir import RunDir
from orchestrator.contract.training import TrainingConfig
from trainer.checkpoint.resume import resume
from trainer.checkpoint.save import Checkpoints
from trainer.checkpoint.state import Stream, TrainingState
from trainer.data.batches import Batches
from trainer.data.ledger import SampleLedger, Start
from trainer.data.loader import Loader
from trainer.data.opening import open_sequences
from trainer.loop import Training, train
from trainer.loss import TokenLoss
from trainer.metrics import MetricsFile
from trainer.model.build import build_stages, check_model, read_model_config
from trainer.model.decoder import Decoder, StageSlice
from trainer.model.fresh import allocate, draw_weights
from trainer.optimizer import build_optimizer
from trainer.outside import Outside
from trainer.parallel.activation import apply_activation_checkpointing
from trainer.parallel.context import local_positions
from trainer.parallel.data import apply_data_parallel
from trainer.parallel.tensor import apply_tensor_parallel, check_tensor_parallel
from trainer.passes import WholeModel
from trainer.ranks import Ranks, arrange, process_group
from trainer.step import Stepper


def main(config: TrainingConfig, outside: Outside) -> int:
    """Train; returns the exit code of the process."""
    with process_group(outside.env):
        ranks = arrange(config.mesh, outside.env)
        return train_on(ranks, config, outside)


def train_on(ranks: Ranks, config: TrainingConfig, outside: Outside) -> int:
    torch.manual_seed(config.train.seed + ranks.env.rank)
    run = RunDir(Path(config.out))
    batches = open_data(config, ranks, outside)
    loader = Loader(batches)
    stages = build_model(config, ranks)
    for stage in stages:
        parallelise(stage, config, ranks)
        allocate(stage, ranks.device)
        stage.place(batches.positions_T.unsqueeze(0).to(ranks.device))
        draw_weights(stage, config.train.seed)
    parameters = [p for stage in stages for p in stage.parameters()]
    optimizer = build_optimizer(parameters, config.train.optimizer)
    state = TrainingState(stages, optimizer, stream_of(config, batches), ranks)
    done = resume(run.checkpoints, state, outside.reporter)
    tokens_per_step = config.train.global_batch_size * config.data.sequence_length
    loss = TokenLoss(tokens_per_step // (config.mesh.data_parallel * config.mesh.cp), ranks.device)
    stepper = Stepper(
        parameters=parameters,
        passes=WholeModel(stages[0], loss, config.mesh.tp > 1),
        optimizer=optimizer,
        batches=loader,
        ranks=ranks,
        tokens_per_step=tokens_per_step,
        grad_clip=config.train.grad_clip,
        ledger=open_ledger(run, batches, ranks.env) if ranks.env.rank == 0 else None,
    )
    checkpoints = Checkpoints(run.checkpoints, state, config.checkpoint, outside.reporter)
    # One writer: the totals are the same on every rank.
    metrics = MetricsFile(run.metrics) if ranks.env.rank == 0 else None
    with loader:
        return train(Training(config, ranks, stepper, checkpoints, metrics, outside), done)


def open_data(config: TrainingConfig, ranks: Ranks, outside: Outside) -> Batches:
    def check(num_tokens: int) -> None:
        """Before data is packed for hours."""
        values = read_model_config(config.model)
        check_model(values, num_tokens, config.data.sequence_length)

    tokens = RunDir(Path(config.out)).tokens
    data = open_sequences(config, tokens, check, outside.reporter)
    coords = config.mesh.coords(ranks.env.rank)
    return Batches(
        train=data.train,
        validation=data.validation,
        fingerprint=data.fingerprint,
        seed=config.train.seed,
        global_batch_size=config.train.global_batch_size,
        micro_batch_size=config.micro_batch_size,
        data_parallel=config.mesh.data_parallel,
        data_rank=ranks.data_rank,
        accountable=not any(coords[axis] for axis in ("pp", "cp", "tp")),
        positions_T=local_positions(config.data.sequence_length),
        device=ranks.device,
    )


def open_ledger(run: RunDir, batches: Batches, env: RankEnv) -> SampleLedger:
    start = Start(
        attempt=env.attempt,
        seed=batches.seed,
        num_samples=batches.train.num,
        global_batch_size=batches.global_batch_size,
        data=batches.fingerprint,
    )
    return SampleLedger(run.samples, start)


def build_model(config: TrainingConfig, ranks: Ranks) -> list[Decoder]:
    """The stages of this rank, on the meta device."""
    values = read_model_config(config.model)
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


def stream_of(config: TrainingConfig, batches: Batches) -> Stream:
    return Stream(
        seed=config.train.seed,
        global_batch_size=config.train.global_batch_size,
        sequence_length=config.data.sequence_length,
        data=batches.fingerprint,
    )
