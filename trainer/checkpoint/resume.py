"""Finds the newest complete checkpoint and loads it, cut for the mesh that this attempt has."""

import json
import logging
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load as load_shards

from orchestrator.contract.checkpoints import MARKER, newest_complete
from orchestrator.errors import TrainingError
from trainer.checkpoint.state import PROGRESS, Progress, Stream, TrainingState
from trainer.emit import Reporter
from trainer.ranks import shared_from_first

LOG = logging.getLogger("trainer")


def resume(checkpoints: Path, state: TrainingState, reporter: Reporter) -> int:
    """Load what there is to go on from; returns the steps that are done."""
    # Rank 0 decides: another host may see a shared folder a moment later.
    folder, passed_over = shared_from_first(lambda: newest_complete(checkpoints))
    step = load(folder, state) if folder else 0
    reporter.step = step
    if state.ranks.env.rank == 0:
        for passed in passed_over:
            LOG.warning("passed over checkpoint %s: %s", passed.name, passed.why)
        LOG.info("resumed from %s", folder) if folder else LOG.info("starting at step 0")
        reporter.resumed(step, passed_over)
    return step


def load(folder: Path, state: TrainingState) -> int:
    """Load `folder` into `state`; returns its step.

    Raises:
        TrainingError: when it is of another model or of other data.
    """
    world_size = json.loads((folder / MARKER).read_text())["world_size"]
    random = state.random() if world_size == state.ranks.env.world_size else {}
    tensors = state.tensors()
    saved = FileSystemReader(folder).read_metadata().state_dict_metadata
    _check_shapes(folder, tensors, saved)
    values: dict[str, Any] = {**tensors, **random, PROGRESS: ""}
    try:
        load_shards(values, checkpoint_id=folder)
    except CheckpointException as exc:
        # It is no Exception, and would pass by everyone who wants to tell of one.
        raise RuntimeError(f"{folder} cannot be loaded: {exc}") from exc
    state.set_random({name: values[name] for name in random})
    progress = Progress.from_json(values[PROGRESS])
    _check_stream(folder, progress.stream, state.stream)
    state.skips.restore(progress.skips)
    return progress.step


def _check_shapes(folder: Path, tensors: dict[str, torch.Tensor], saved: dict[str, Any]) -> None:
    for name, tensor in tensors.items():
        size = getattr(saved.get(name), "size", None)
        if size != tensor.shape:
            there = "missing" if size is None else f"of shape {tuple(size)}"
            raise TrainingError(
                f"{folder} is of another model: {name} is of shape {tuple(tensor.shape)} here"
                f" and {there} there",
                fix="train the model of the checkpoint, or start in another directory",
            )


def _check_stream(folder: Path, there: Stream, here: Stream) -> None:
    """A job that goes on with other data would skip samples, or see some twice."""
    was = asdict(there)
    changed = [
        f"{key} (was {was[key]})" for key, value in asdict(here).items() if value != was[key]
    ]
    if changed:
        raise TrainingError(
            f"{folder} belongs to a run with another {', '.join(changed)}",
            fix="put the old value or the old files back, or start in another directory",
        )
