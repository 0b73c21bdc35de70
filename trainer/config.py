"""Reads the trainer's configuration, and refuses early what this trainer cannot do."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from orchestrator.contract.codec import Invalid, decode
from orchestrator.contract.training import TrainingConfig
from orchestrator.errors import TrainingError
from trainer.report import check_writers


def load_config(path: Path) -> TrainingConfig:
    """The configuration in a `.json` file, or in a YAML file of any other name.

    Raises:
        TrainingError: with everything that is wrong with it.
    """
    try:
        text = path.read_text()
        data = json.loads(text) if path.suffix == ".json" else parse_yaml(text)
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
        config = replace(config, parallel=config.parallel.filled(world_size))
    except Invalid as exc:
        raise TrainingError(str(exc)) from exc
    _check(config, world_size)
    _check_training(config)
    check_writers(config.train)
    return config


def _check(config: TrainingConfig, world_size: int) -> None:
    mesh = config.mesh
    for axis, degree, name in (("pp", mesh.pp, "pipeline"), ("cp", mesh.cp, "context")):
        if degree > 1:
            raise TrainingError(
                f"parallel.{axis}={degree}: this trainer does not do {name} parallel yet",
                fix=f"set parallel.{axis} to 1 and give its ranks to dp_shard",
            )
    if mesh.world_size != world_size:
        raise TrainingError(
            f"the mesh ({mesh}) is for {mesh.world_size} ranks, but torchrun started {world_size}",
            fix=f"start {mesh.world_size} ranks, or change the degrees under parallel",
        )
    if config.train.compile and mesh.tp > 1:
        # torch 2.13 compiles a layer of DTensors without complaint, and its gradients are wrong by
        # several per cent, or its backward raises, depending on the mesh.
        raise TrainingError(
            f"train.compile with parallel.tp={mesh.tp}: torch computes wrong gradients there",
            fix="set train.compile to false, or parallel.tp to 1",
        )
    if config.train.activation_checkpointing == "auto":
        raise TrainingError(
            "activation_checkpointing: auto is for the planner to resolve",
            fix="set it to none, selective, full or every_k",
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
