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
from trainer.model.adapters import add_adapters, base_of, draw_adapters
from trainer.model.build import build_stages, check_model, read_model_config
from trainer.model.decoder import Decoder
from trainer.model.float8 import apply_float8, scale_after_steps
from trainer.model.fresh import allocate, draw_weights
from trainer.model.quantize import fill_quantised, quantise
from trainer.optimizer import build_optimizer
from trainer.outside import Outside
from trainer.parallel.activation import apply_activation_checkpointing
from trainer.parallel.compile import compile_layers
from trainer.parallel.context import (
    apply_context_parallel,
    check_context_parallel,
    local_positions,
)
from trainer.parallel.data import apply_data_parallel, gather_after_step, parameters_to_update
from trainer.parallel.pipeline import Pipeline, make_line
from trainer.parallel.stages import slices_of_rank
from trainer.parallel.tensor import apply_tensor_parallel, check_tensor_parallel
from trainer.parallel.tied import TiedWeight, find_tied
from trainer.passes import Passes, WholeModel
from trainer.ranks import Ranks, arrange, process_group
from trainer.step import Stepper


def main(config: TrainingConfig, outside: Outside) -> int:
    """Train; returns the exit code of the process."""
    with process_group(outside.env):
        ranks = arrange(config.mesh, outside.env)
        return train_on(ranks, config, outside)


def train_on(ranks: Ranks, config: TrainingConfig, outside: Outside) -> int:
    job, done = assemble(ranks, config, outside)
    with job.stepper.batches:
        return train(job, done)


def assemble(ranks: Ranks, config: TrainingConfig, outside: Outside) -> tuple[Training, int]:
    """All that trains, and how many steps were done before."""
    torch.manual_seed(config.train.seed + ranks.env.rank)
    run = RunDir(Path(config.out))
    batches = open_data(config, ranks, outside)
    loader = Loader(batches)
    stages = build_model(config, ranks)
    for stage in stages:
        parallelise(stage, config, ranks)
        allocate(stage, ranks.device, config.parallel.fsdp.cpu_offload)
        stage.place(batches.positions_T.unsqueeze(0).to(ranks.device))
        fill(stage, config)
    parameters = [p for stage in stages for p in parameters_to_update(stage)]
    optimizer = build_optimizer(parameters, config.train.optimizer)
    gather_after_step(optimizer, stages)
    if config.train.float8:
        scale_after_steps(stages, optimizer)
    state = TrainingState(stages, optimizer, stream_of(config, batches), ranks)
    done = resume(run.checkpoints, state, outside.reporter)
    tied = find_tied(stages, ranks.mesh["pp"].get_group())
    tied.follow(optimizer)
    tokens_per_step = config.train.global_batch_size * config.data.sequence_length
    loss = TokenLoss(tokens_per_step // (config.mesh.data_parallel * config.mesh.cp), ranks.device)
    stepper = Stepper(
        parameters=parameters,
        tied=tied.copies,
        passes=choose_passes(stages, config, ranks, loss, tied),
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
    return Training(config, ranks, stepper, checkpoints, metrics, outside), done


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
        positions_T=local_positions(
            config.data.sequence_length,
            config.parallel.context,
            config.mesh.cp,
            ranks.mesh["cp"].get_local_rank(),
        ),
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
    tokens = config.data.sequence_length
    check_context_parallel(values, config.parallel.context, config.mesh, tokens)
    if config.mesh.tp > 1:
        check_tensor_parallel(values, config.mesh.tp, tokens // config.mesh.cp)
    pipeline, pp_rank = config.parallel.pipeline, ranks.mesh["pp"].get_local_rank()
    slices = slices_of_rank(values, pipeline, config.mesh.pp, pp_rank, tokens)
    stages = build_stages(values, slices)
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
            quantise(decoder, ranks.shards.size(), ranks.device)


def choose_passes(
    stages: list[Decoder], config: TrainingConfig, ranks: Ranks, loss: TokenLoss, tied: TiedWeight
) -> Passes:
    tensor_parallel = config.mesh.tp > 1
    if config.mesh.pp == 1:
        return WholeModel(stages[0], loss, tensor_parallel)
    tokens = stages[0].positions_1T.shape[1]
    line = make_line(config, stages[0].config.hidden_size, tokens, ranks)
    return Pipeline(stages, line, loss, tied, config.gradient_accumulation, tensor_parallel)


def parallelise(decoder: Decoder, config: TrainingConfig, ranks: Ranks) -> None:
    """Inside out: tensors are cut, layers wrapped and compiled, and what is left is sharded."""
    if config.mesh.tp > 1:
        apply_tensor_parallel(decoder, ranks.mesh["tp"])
    if config.mesh.cp > 1:
        apply_context_parallel(decoder, ranks.mesh["cp"], config.parallel.context)
    train = config.train
    apply_activation_checkpointing(decoder, train.activation_checkpointing, train.checkpoint_every)
    if train.compile:
        compile_layers(decoder)
    apply_data_parallel(decoder, ranks, config.parallel, train)


def fill(decoder: Decoder, config: TrainingConfig) -> None:
    """First weights; adapters, which are drawn otherwise than the model, get theirs last."""
    seed = config.train.seed
    draw_weights(decoder, seed)
    fill_quantised(decoder, lambda weights: draw_weights(weights, seed))
    draw_adapters(decoder, seed)


def stream_of(config: TrainingConfig, batches: Batches) -> Stream:
    return Stream(
        seed=config.train.seed,
        global_batch_size=config.train.global_batch_size,
        sequence_length=config.data.sequence_length,
        data=batches.fingerprint,
        base=base_of(config.model),
    )
