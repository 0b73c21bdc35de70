"""Reads the trainer's configuration, and refuses early what this trainer cannot do."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from orchestrator.contract.codec import Invalid, decode
from orchestrator.contract.files.trainer_config import TrainingConfig
from orchestrator.contract.read_json import read_json
from orchestrator.contract.spec.pipeline_spec import SPLITS_BACKWARD, demand
from orchestrator.errors import TrainingError
from trainer.measure.report import check_writers


def load_config(path: Path) -> TrainingConfig:
    """The configuration in a `.json` file, or in a YAML file of any other name.

    Raises:
        TrainingError: with everything that is wrong with it.
    """
    try:
        text = path.read_text()
        data = read_json(text) if path.suffix == ".json" else parse_yaml(text)
    except (OSError, ValueError) as exc:
        raise TrainingError(
            f"cannot read the configuration {path}: {exc}", fix="give a JSON or YAML file"
        ) from exc
    try:
        config: TrainingConfig = decode(TrainingConfig, data)
    except Invalid as exc:
        raise TrainingError(f"{path} is not a trainer configuration:\n{exc}") from exc
    return config


def parse_yaml(text: str) -> Any:
    """YAML in which `3e-4` is a number, as in JSON; YAML 1.1 takes it for a string."""
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
    """`config` with every `auto` decided that `world_size` ranks decide.

    Raises:
        TrainingError: when this trainer cannot do what a well-formed configuration asks.
    """
    try:
        kind = config.train.activation_checkpointing
        train = replace(config.train, activation_checkpointing="none" if kind == "auto" else kind)
        config = replace(config, parallel=config.parallel.filled(world_size), train=train)
    except Invalid as exc:
        raise TrainingError(str(exc)) from exc
    _check(config, world_size)
    _check_training(config)
    check_writers(config.train)
    return config


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
    if config.train.compile and mesh.tp > 1:
        # torch 2.13 compiles a layer of DTensors without complaint, and its gradients are wrong by
        # several per cent, or its backward raises, depending on the mesh.
        raise TrainingError(
            f"train.compile with parallel.tp={mesh.tp}: torch computes wrong gradients there",
            fix="set train.compile to false, or parallel.tp to 1",
        )
    if problems := [*_adapter_problems(config)]:
        raise TrainingError("; ".join(problems), fix="change one of the two, of each pair")


def _check_pipeline(config: TrainingConfig) -> None:
    """That the schedule can run with the micro batches of a step."""
    pp, micro_batches = config.mesh.pp, config.gradient_accumulation
    schedule = config.parallel.pipeline.schedule
    asked = f"parallel.pipeline.schedule={schedule} with parallel.pp={pp}"
    if wanted := demand(config.parallel.pipeline, pp, micro_batches):
        raise TrainingError(
            f"{asked} needs micro batches a step to be {wanted}, and there are {micro_batches}",
            fix="change micro_batch_size, train.global_batch_size or the degrees, or take schedule"
            " gpipe",
        )
    if schedule == SPLITS_BACKWARD and config.train.activation_checkpointing == "selective":
        # zbv goes backward through a layer twice, for what came in and for the weights; torch 2.13
        # raises "Trying to backward an extra time" there. Whole layers it recomputes twice.
        raise TrainingError(
            f"{asked}: torch recomputes layers selectively for one backward pass, and zbv has two",
            fix="set train.activation_checkpointing to full, every_k or none, or take another"
            " schedule",
        )
    if schedule == SPLITS_BACKWARD and config.train.compile:
        # A compiled layer gives its buffers away in its one backward pass, and raises at two.
        raise TrainingError(
            f"{asked}: torch cannot split the backward pass of a compiled layer in two",
            fix="set train.compile to false, or take another schedule",
        )


def _check_data_parallel(config: TrainingConfig) -> None:
    shards = config.mesh.dp_shard * config.mesh.cp
    ranks = config.parallel.fsdp.reshard
    if not isinstance(ranks, bool) and shards % ranks:
        raise TrainingError(
            f"parallel.fsdp.reshard_after_forward is {ranks}, which does not divide the {shards}"
            " ranks that weights are sharded over (dp_shard x cp)",
            fix="set it to a divisor of them, to true or to false",
        )


def _adapter_problems(config: TrainingConfig) -> Iterator[str]:
    """What cannot be had together with adapters, each with what torch 2.13 and torchao 0.18 do."""
    lora, parallel = config.model.lora, config.parallel
    if lora is None:
        return
    if config.train.float8:
        # PEFT's A and B are as narrow as the rank, and float8 products need multiples of 16.
        yield "model.lora with train.float8: adapters are too narrow for float8"
    if lora.quantize == "none":
        return
    if config.mesh.tp > 1:
        # torchao: NotImplementedError: aten.split(NF4Tensor, dim=1), which a rowwise layer needs.
        yield (
            f"model.lora.quantize: nf4 with parallel.tp={config.mesh.tp}: 4-bit weights cannot be"
            " cut by columns"
        )
    if parallel.fsdp.cpu_offload and config.mesh.dp_shard * config.mesh.cp == 1:
        # FSDP gathers nothing there, so it would not bring them to the device either.
        yield (
            "model.lora.quantize: nf4 with parallel.fsdp.cpu_offload: on one shard 4-bit weights"
            " stay where they are used"
        )
    if not isinstance(parallel.fsdp.reshard_after_forward, bool):
        # FSDP: AssertionError: Expected 1 all_gather_output, got 3.
        yield (
            "model.lora.quantize: nf4 with parallel.fsdp.reshard_after_forward="
            f"{parallel.fsdp.reshard_after_forward}: 4-bit weights cannot be sharded anew after the"
            " forward pass"
        )


def _check_training(config: TrainingConfig) -> None:
    train, ranks = config.train, config.mesh.world_size
    alone = ranks == 1 and train.dtype == "float32"
    whole = config.parallel.data == "ddp" and config.mesh.tp == 1
    if train.optimizer.name == "adafactor" and not alone and not whole:
        # Measured on torch 2.13: its factors are norms along rows and columns, which DTensor makes
        # `_NormPartial`, and squaring those in place raises ("in-place operations that require
        # placement changes are not supported"), with foreach and without.
        raise TrainingError(
            "train.optimizer.name=adafactor: torch's Adafactor fails on parameters cut over ranks",
            fix="use adamw, or keep whole matrices: parallel.data: ddp and tp: 1",
        )
    profile = train.profile
    if profile is not None and max(profile.ranks, default=0) >= ranks:
        raise TrainingError(
            f"train.profile.ranks={list(profile.ranks)}: the ranks are 0 to {ranks - 1}",
            fix="name ranks that there are",
        )
