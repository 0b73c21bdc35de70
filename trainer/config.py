"""Reads the trainer's configuration and refuses early what this trainer cannot do."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from orchestrator.contract.codec import Invalid, decode
from orchestrator.contract.devices import compute_dtype
from orchestrator.contract.files.trainer_config import TrainingConfig
from orchestrator.contract.read_json import read_json
from orchestrator.contract.spec.pipeline_spec import SPLITS_BACKWARD, demand
from orchestrator.contract.spec.train_spec import BY_OPERATION, TrainSpec
from orchestrator.errors import TrainingError
from trainer.measure.report import check_writers


def load_config(path: Path) -> TrainingConfig:
    """The configuration in a `.json` file, or in a YAML file of any other name.

    Raises:
        TrainingError: with all its mistakes.
    """
    try:
        text = path.read_text()
        data = read_json(text) if path.suffix == ".json" else parse_yaml(text)
    except (OSError, ValueError) as exc:
        raise TrainingError(
            f"failed to read the configuration {path}: {exc}", fix="give a JSON or YAML file"
        ) from exc
    try:
        config: TrainingConfig = decode(TrainingConfig, data)
    except Invalid as exc:
        raise TrainingError(f"{path} is not a trainer configuration:\n{exc}") from exc
    return config


def parse_yaml(text: str) -> Any:
    """YAML in which `3e-4` is a number, as in JSON. In YAML 1.1 it is a string."""
    import yaml

    class Loader(yaml.SafeLoader):
        pass

    number = re.compile(r"[-+]?(\d[\d_]*\.?\d*|\.\d+)[eE][-+]?\d+$")
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+.0123456789"))
    try:
        return yaml.load(text, Loader)
    except yaml.YAMLError as exc:
        raise ValueError(str(exc)) from exc


def complete(config: TrainingConfig, world_size: int) -> TrainingConfig:
    """`config` with each `auto` replaced by the value that follows from `world_size`.

    Raises:
        TrainingError: the configuration is well-formed, but this trainer cannot do what it asks.
    """
    try:
        parallel, train = config.parallel.filled(world_size), _without_auto(config.train)
        config = replace(config, parallel=parallel, train=train)
    except Invalid as exc:
        raise TrainingError(str(exc)) from exc
    _check(config, world_size)
    _check_training(config)
    check_writers(config.train)
    return config


def _without_auto(train: TrainSpec) -> TrainSpec:
    """`train` with the keys decided that a planner decides otherwise."""
    kind, float8 = train.activation_checkpointing, train.float8 is True
    return replace(
        train,
        activation_checkpointing="none" if kind == "auto" else kind,
        compile=float8 if train.compile == "auto" else train.compile,
        float8=float8,
    )


def _check(config: TrainingConfig, world_size: int) -> None:
    mesh = config.mesh
    if mesh.world_size != world_size:
        raise TrainingError(
            f"the mesh ({mesh}) is for {mesh.world_size} ranks, but torchrun started {world_size}",
            fix=f"start {mesh.world_size} ranks, or change the degrees under parallel",
        )
    _check_data_parallel(config)
    if mesh.pp > 1:
        _check_pipeline(config)
    if problems := [*_adapter_problems(config)]:
        raise TrainingError("; ".join(problems), fix="change one setting of each pair")
    if config.train.float8 and not config.train.compile:
        raise TrainingError(
            "train.float8 without train.compile: torchao then scales values in separate kernels,"
            " which is slower than bfloat16",
            fix="set train.compile to true, or train.float8 to false",
        )


def _check_pipeline(config: TrainingConfig) -> None:
    """Check that the schedule can run with the micro batches of a step."""
    pp, micro_batches = config.mesh.pp, config.gradient_accumulation
    schedule = config.parallel.pipeline.schedule
    asked = f"parallel.pipeline.schedule={schedule} with parallel.pp={pp}"
    if wanted := demand(config.parallel.pipeline, pp, micro_batches):
        raise TrainingError(
            f"{asked} needs the number of micro batches per step to be {wanted}; it is"
            f" {micro_batches}",
            fix="change micro_batch_size, train.global_batch_size or the degrees, or use schedule"
            " gpipe",
        )
    recompute = config.train.activation_checkpointing
    if schedule == SPLITS_BACKWARD and recompute in BY_OPERATION:
        # zbv runs backward through a layer twice: once for the inputs, once for the weights. torch
        # 2.13 then raises "Trying to backward an extra time". Full layers are recomputed twice.
        raise TrainingError(
            f"{asked}: {recompute} recomputation supports one backward pass per layer; zbv runs"
            " two",
            fix="set train.activation_checkpointing to full, every_k or none, or use another"
            " schedule",
        )
    if schedule == SPLITS_BACKWARD and config.train.compile:
        # A compiled layer frees its buffers in the first backward pass, and the second one raises.
        raise TrainingError(
            f"{asked}: torch cannot split the backward pass of a compiled layer",
            fix="set train.compile to false, or use another schedule",
        )


def _check_data_parallel(config: TrainingConfig) -> None:
    shards = config.mesh.dp_shard * config.mesh.cp
    ranks = config.parallel.fsdp.reshard
    if not isinstance(ranks, bool) and shards % ranks:
        raise TrainingError(
            f"parallel.fsdp.reshard_after_forward={ranks} does not divide the {shards} ranks that"
            " the weights are sharded over (dp_shard x cp)",
            fix=f"set it to a divisor of {shards}, to true or to false",
        )


def _adapter_problems(config: TrainingConfig) -> Iterator[str]:
    """Settings that adapters exclude; comments quote the errors of torch 2.13 and torchao 0.18."""
    lora, parallel = config.model.lora, config.parallel
    if lora is None:
        return
    if config.train.float8:
        # One side of PEFT's A and B is the LoRA rank, and float8 products need multiples of 16.
        yield "model.lora with train.float8: adapters are too narrow for float8"
    if lora.quantize == "none":
        return
    if config.mesh.tp > 1:
        # torchao: NotImplementedError: aten.split(NF4Tensor, dim=1). A rowwise layer needs it.
        yield (
            f"model.lora.quantize: nf4 with parallel.tp={config.mesh.tp}: 4-bit weights cannot be"
            " split by columns"
        )
    if parallel.fsdp.cpu_offload and config.mesh.dp_shard * config.mesh.cp == 1:
        # With one shard FSDP gathers nothing, so nothing would copy the weights to the device.
        yield (
            "model.lora.quantize: nf4 with parallel.fsdp.cpu_offload: with one shard, FSDP does not"
            " copy 4-bit weights to the device"
        )
    if not isinstance(parallel.fsdp.reshard, bool):
        # FSDP: AssertionError: Expected 1 all_gather_output, got 3.
        yield (
            "model.lora.quantize: nf4 with parallel.fsdp.reshard_after_forward="
            f"{parallel.fsdp.reshard}: 4-bit weights cannot be resharded after the"
            " forward pass"
        )


def with_dtype(config: TrainingConfig, *, fast_bfloat16: bool) -> TrainingConfig:
    """`config` with `train.dtype` decided; `fast_bfloat16` as in `compute_dtype`.

    Raises:
        TrainingError: the optimizer cannot train in that format.
    """
    dtype = compute_dtype(config.train.dtype, fast_bfloat16=fast_bfloat16)
    config = replace(config, train=replace(config.train, dtype=dtype))
    _check_optimizer(config)
    return config


def _check_optimizer(config: TrainingConfig) -> None:
    train, ranks = config.train, config.mesh.world_size
    single_rank = ranks == 1 and train.dtype in ("float32", "auto")
    unsharded = config.parallel.data == "ddp" and config.mesh.tp == 1
    if train.optimizer.name == "adafactor" and not single_rank and not unsharded:
        # Measured on torch 2.13: Adafactor's factors are norms along rows and columns. As DTensors
        # they are `_NormPartial`, and squaring those in place raises ("in-place operations that
        # require placement changes are not supported"), with foreach and without.
        raise TrainingError(
            "train.optimizer.name=adafactor: torch's Adafactor fails on sharded parameters",
            fix="use adamw, or keep the weights unsharded: parallel.data: ddp and tp: 1",
        )


def _check_training(config: TrainingConfig) -> None:
    _check_optimizer(config)
    ahead = config.train.run_ahead
    if ahead not in ("auto", 0) and config.parallel.fsdp.cpu_offload:
        # The host computes the update, so it must know first whether the gradients are finite.
        raise TrainingError(
            f"train.run_ahead={ahead} with parallel.fsdp.cpu_offload: the host computes the update",
            fix="set train.run_ahead to auto or 0",
        )
    profile, ranks = config.train.profile, config.mesh.world_size
    if profile is not None and max(profile.ranks, default=0) >= ranks:
        raise TrainingError(
            f"train.profile.ranks={list(profile.ranks)}: the job has ranks 0 to {ranks - 1}",
            fix=f"name ranks from 0 to {ranks - 1}",
        )
