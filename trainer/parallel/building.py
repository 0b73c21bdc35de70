"""Builds this rank's stages of the model: create, parallelise, allocate and fill them."""

from collections.abc import Sequence

import torch

from orchestrator.contract.files.trainer_config import TrainingConfig
from trainer.loss import TokenLoss
from trainer.measure.timing import Stopwatch
from trainer.model.adapters import add_adapters, draw_adapters
from trainer.model.build import build_stages, read_model_config
from trainer.model.decoder import Decoder
from trainer.model.float8 import apply_float8
from trainer.model.init_weights import allocate
from trainer.model.quantize import fill_quantised, quantise
from trainer.model.weights import Weights, find_weights, first_weights
from trainer.parallel.activation import apply_activation_checkpointing
from trainer.parallel.compile import compile_layers, compiles_inside_checkpoints
from trainer.parallel.context import (
    apply_context_parallel,
    check_context_parallel,
    check_document_masks,
)
from trainer.parallel.context.in_documents import apply_document_masks
from trainer.parallel.data import apply_data_parallel
from trainer.parallel.fsdp import wraps_layers
from trainer.parallel.passes import Passes, WholeModel
from trainer.parallel.pipeline import Pipeline, pipeline_rank
from trainer.parallel.stages import slices_of_rank
from trainer.parallel.tensor import apply_tensor_parallel, check_tensor_parallel
from trainer.parallel.tied import TiedWeight
from trainer.rank.ranks import Ranks, on_all_ranks


def build_model(
    config: TrainingConfig, ranks: Ranks, positions_T: torch.Tensor, *, resumed: bool
) -> list[Decoder]:
    """The stages of this rank; its tokens are at `positions_T` of each sequence.

    With `resumed`, trained weights are not initialised, because the checkpoint has them.
    """
    weights = find_weights(config.model)
    stages = stages_without_storage(config, ranks)
    for stage in stages:
        change_linears(stage, config, ranks)
        parallelise(stage, config, ranks)
        allocate(stage, ranks.device, config.parallel.fsdp.cpu_offload)
        stage.set_positions(positions_T.unsqueeze(0).to(ranks.device))
    on_all_ranks(lambda: fill(stages, config.train.seed, weights, resumed=resumed))
    return stages


def stages_without_storage(config: TrainingConfig, ranks: Ranks) -> list[Decoder]:
    """Raises TrainingError if the mesh does not suit the model."""
    values = read_model_config(config.model)
    tokens = config.data.sequence_length
    check_context_parallel(values, config.parallel.context, config.mesh, tokens)
    if config.data.masks_documents:
        check_document_masks(values)
    if config.mesh.tp > 1:
        check_tensor_parallel(values, config.mesh.tp, tokens // config.mesh.cp)
    pipeline, pp_rank = config.parallel.pipeline, ranks.mesh["pp"].get_local_rank()
    return build_stages(values, slices_of_rank(values, pipeline, config.mesh.pp, pp_rank, tokens))


def change_linears(decoder: Decoder, config: TrainingConfig, ranks: Ranks) -> None:
    """Apply float8, LoRA and quantisation, which need unsharded layers without storage."""
    lora = config.model.lora
    if config.train.float8:
        apply_float8(decoder, ranks.device, config)
    if lora is not None:
        add_adapters(decoder, lora)
        if lora.quantize == "nf4":
            quantise(decoder, ranks.shards.size(), ranks.device)


def parallelise(decoder: Decoder, config: TrainingConfig, ranks: Ranks) -> None:
    """Apply the axes from the inside out: first tensors are split, then layers are wrapped and
    compiled, then FSDP shards the result."""
    if config.mesh.tp > 1:
        apply_tensor_parallel(decoder, ranks.mesh["tp"])
    if config.mesh.cp > 1:
        apply_context_parallel(decoder, ranks.mesh["cp"], config.parallel.context)
    elif config.data.masks_documents:
        apply_document_masks(decoder)
    train = config.train
    apply_activation_checkpointing(decoder, train.recompute, train.checkpoint_every, config.mesh.tp)
    if train.compile:
        units_inside = config.parallel.data == "fsdp" and not wraps_layers(
            decoder, config.parallel.fsdp.wrap
        )
        inside = compiles_inside_checkpoints(train.recompute, config.mesh.tp, units_inside)
        compile_layers(decoder, inside_checkpoints=inside)
    apply_data_parallel(decoder, ranks, config.parallel, train)


def fill(stages: Sequence[Decoder], seed: int, weights: Weights | None, *, resumed: bool) -> None:
    """Fill the weights: plain ones, then 4-bit ones, then adapters, which have their own rule."""
    first_weights(stages, weights, seed, resumed=resumed)
    for stage in stages:
        fill_quantised(stage, lambda part: first_weights([part], weights, seed, resumed=False))
        if not resumed:
            draw_adapters(stage, seed)


def choose_passes(
    stages: list[Decoder],
    config: TrainingConfig,
    ranks: Ranks,
    loss: TokenLoss,
    tied: TiedWeight,
    watch: Stopwatch,
) -> Passes:
    if config.mesh.pp == 1:
        alone = config.parallel.data != "fsdp" and config.mesh.tp == config.mesh.cp == 1
        return WholeModel(stages[0], loss, watch, forward_alone=alone)
    tokens = stages[0].positions_1T.shape[1]
    rank = pipeline_rank(config, stages[0].config.hidden_size, tokens, ranks)
    micro_batches = config.gradient_accumulation
    return Pipeline(stages, rank, loss, tied, micro_batches, watch)
