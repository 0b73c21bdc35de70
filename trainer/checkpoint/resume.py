"""Finds the newest usable checkpoint, and loads it resharded for the mesh of this attempt."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as load_shards

from ndctl.rank.checkpoint_files import defect_of, read_marker, step_of
from orchestrator.contract.files.checkpoint_names import SkippedCheckpoint, newest_complete
from orchestrator.contract.skipped_batches import Window, merge_windows
from orchestrator.errors import TrainingError
from trainer.checkpoint.memory.find import InMemory, has_read, newest_in_memory
from trainer.checkpoint.memory.opened import OpenMemory
from trainer.checkpoint.read import CheckpointReader, unreadable
from trainer.checkpoint.state import (
    MODEL,
    OPTIMIZER,
    Origin,
    Progress,
    Stream,
    TrainingState,
)
from trainer.checkpoint.verify import verify_on_all_ranks
from trainer.listing import listed
from trainer.rank.ranks import Ranks, broadcast_from_rank0, on_all_ranks
from trainer.rank.reporter import Reporter

LOG = logging.getLogger("trainer")

FIX = "use the model, optimizer and LoRA settings of the checkpoint, or start in another directory"
COMPUTATION_KEYS = (
    "model_type",
    "tie_word_embeddings",
    "num_hidden_layers",
    "n_layer",
    "num_attention_heads",
    "n_head",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "activation_function",
    "rms_norm_eps",
    "layer_norm_epsilon",
    "rope_parameters",
)
"""Keys of a model's config that change its computation, but not always the shape of a tensor."""

KEYS = {
    "seed": "train.seed",
    "global_batch_size": "train.global_batch_size",
    "sequence_length": "data.sequence_length",
    "document_mask": "data.document_mask",
    "base": "the frozen model under the adapters",
}
"""Names of the fields of `Stream` in a spec. Its data has a fingerprint only."""
OTHER_DATA = (
    "the training files, their tokenizer, or how much data.validation holds out is not the same"
)


@dataclass(frozen=True, slots=True)
class Found:
    folder: Path | None
    """The checkpoint to resume from; None to start at step 0."""
    passed_over: tuple[SkippedCheckpoint, ...]
    """Newer checkpoints that are not used."""
    skip: Sequence[Window] = ()
    """Data to skip. The checkpoint has read none of it."""
    in_memory: InMemory | None = None
    """This rank's part of a checkpoint in memory, which is used in place of `folder`."""
    on_disk: int = 0
    """Step of the newest complete checkpoint on the disk, if `in_memory` is used."""

    @property
    def has_weights(self) -> bool:
        return self.folder is not None or self.in_memory is not None


def find_checkpoint(
    checkpoints: Path,
    ranks: Ranks,
    *,
    verify: bool,
    skip: Sequence[Window] = (),
    memory: OpenMemory | None = None,
) -> Found:
    """The newest complete checkpoint that has read none of the data to skip, the same on every
    rank. With `verify`, the checksums of its files must match too. If all ranks have a step in
    `memory` that is as new, that is used, and no file of a checkpoint is read.

    Raises:
        TrainingError: on every rank, if all checkpoints have read some of the data to skip. Then
            only a start at step 0 could skip it, which would discard the whole training. It is
            raised unless the data starts at batch 1, where nothing is lost. Also if `checkpoints`
            is not a folder.
    """
    broadcast_from_rank0(partial(_refuse_file, checkpoints))
    if not ranks.env.resume:
        # The job starts fresh in a directory that may have checkpoints of an earlier run.
        return Found(None, broadcast_from_rank0(partial(_of_another_run, checkpoints)), skip)
    remembered: tuple[SkippedCheckpoint, ...] = ()
    if memory is not None:
        found, remembered = newest_in_memory(memory, ranks, skip)
        newest, _ = broadcast_from_rank0(lambda: newest_complete(checkpoints))
        on_disk = 0 if newest is None else step_of(newest.name) or 0
        if found is not None and on_disk <= found.header.made.step:
            return Found(None, remembered, skip, found, on_disk)
    refused: dict[str, str] = {}
    too_late: list[str] = []
    while True:
        # Rank 0 decides, because other hosts may see changes of a shared folder later.
        folder, passed = broadcast_from_rank0(lambda: newest_complete(checkpoints, refused))
        if folder is None and too_late and not any(window.first == 1 for window in skip):
            raise _all_too_late(too_late, skip)
        if folder is None:
            return Found(None, (*remembered, *passed), skip)
        defect = verify_on_all_ranks(folder, ranks.env) if verify else None
        if defect is None and skip:
            defect = broadcast_from_rank0(partial(_has_read, folder, skip))
            too_late += [folder.name] if defect else []
        if defect is None:
            return Found(folder, (*remembered, *passed), skip)
        refused[folder.name] = defect


def _refuse_file(checkpoints: Path) -> None:
    """Otherwise the job would train up to its last step, and fail to save it."""
    if checkpoints.exists() and not checkpoints.is_dir():
        raise TrainingError(
            f"no checkpoint can be saved: {checkpoints} is not a folder",
            fix=f"move {checkpoints} to another place",
        )


def _of_another_run(checkpoints: Path) -> tuple[SkippedCheckpoint, ...]:
    names = [folder.name for folder in checkpoints.glob("step-*") if not defect_of(folder)]
    return tuple(
        SkippedCheckpoint(name, "it is not in the job's journal") for name in sorted(names)
    )


def _has_read(folder: Path, skip: Sequence[Window]) -> str | None:
    return has_read(CheckpointReader(folder).progress(), skip)


def _all_too_late(names: Sequence[str], skip: Sequence[Window]) -> TrainingError:
    return TrainingError(
        f"all checkpoints ({listed(names)}) have read some of the batches to skip"
        f" ({', '.join(map(str, skip))}); no older checkpoint exists",
        fix="keep more checkpoints (checkpoint.keep), and resume without skipping: ndctl submit"
        " SPEC --resume --set resilience.on_nan=stop",
    )


def resume(
    found: Found, state: TrainingState, reporter: Reporter
) -> tuple[int, tuple[Window, ...]]:
    """Load the checkpoint, if there is one. Returns the number of steps that are done, and all data
    to skip: by earlier attempts and by this one."""
    if found.in_memory is not None:
        step, skipped = _load_from_memory(found.in_memory, state)
    else:
        step, skipped = load(found.folder, state) if found.folder else (0, ())
    reporter.step = step
    if state.ranks.env.rank == 0:
        for passed in found.passed_over:
            LOG.warning("not using checkpoint %s: %s", passed.name, passed.why)
        if found.in_memory is not None:
            LOG.info("resumed from step %d in the memory of the hosts", step)
        elif found.folder:
            LOG.info("resumed from %s", found.folder)
        else:
            LOG.info("starting at step 0")
        reporter.resumed(step, found.passed_over, in_memory=found.in_memory is not None)
    return step, merge_windows(skipped, found.skip)


def _load_from_memory(found: InMemory, state: TrainingState) -> tuple[int, tuple[Window, ...]]:
    if found.other is not None:
        name, other = f"step-{found.header.made.step} in memory", found.other
        source = Source(name, found.progress, other.world_size, other.shapes)
        return _load(source, state, partial(load_shards, storage_reader=other))
    # The trainer's configuration is the same, so the tensors are.
    assert found.slot is not None
    progress, random = found.progress, state.random()
    found.slot.read(found.header.table, {**state.tensors(), **random})
    state.set_random(random)
    state.skips.restore(progress.skips)
    state.spikes.restore(progress.spikes)
    return progress.step, progress.skipped


def load(folder: Path, state: TrainingState) -> tuple[int, tuple[Window, ...]]:
    """Load `folder` into `state`; returns its step and the data that was skipped.

    Raises:
        TrainingError: on every rank, if reading failed or if the checkpoint belongs to another
            model, optimizer or data.
    """
    source = broadcast_from_rank0(lambda: _contents(folder))
    return _load(source, state, partial(load_shards, checkpoint_id=folder))


@dataclass(frozen=True, slots=True)
class Source:
    """What is known of a checkpoint before it is loaded."""

    name: str
    progress: Progress
    world_size: int
    shapes: Mapping[str, torch.Size]


def _load(
    source: Source, state: TrainingState, read: Callable[[dict[str, Any]], None]
) -> tuple[int, tuple[Window, ...]]:
    name, progress = source.name, source.progress
    check_model(name, progress.origin, state.origin)
    check_stream(name, progress.stream, state.stream)
    tensors = state.tensors()
    here = {key: tensor.shape for key, tensor in tensors.items()}
    # Each pipeline stage has other tensors, so every rank checks its own.
    on_all_ranks(lambda: check_tensors(name, here, source.shapes))
    # Random states belong to ranks; with another number of ranks they have no meaning.
    random = state.random() if source.world_size == state.ranks.env.world_size else {}
    values: dict[str, Any] = {**tensors, **random}
    try:
        read(values)
    except CheckpointException as exc:
        # It is not an Exception, so no `except Exception` further up would report it.
        raise unreadable(name, exc) from exc
    state.set_random({name: values[name] for name in random})
    state.skips.restore(progress.skips)
    state.spikes.restore(progress.spikes)
    return progress.step, progress.skipped


def _contents(folder: Path) -> Source:
    reader = CheckpointReader(folder)
    world_size = read_marker(folder)["world_size"]
    return Source(str(folder), reader.progress(), world_size, reader.shapes)


def check_model(name: str, saved: Origin, here: Origin) -> None:
    """Raises TrainingError if the models differ in a way that the shapes of tensors do not show."""
    if (saved.lora is None) != (here.lora is None):
        trained = "all weights, not only adapters" if saved.lora is None else "only adapters"
        raise TrainingError(f"{name} belongs to a run that trained {trained}", fix=FIX)
    was, now = saved.config, here.config
    changed = [
        f"{key} was {was[key]} and is now {now[key]}"
        for key in COMPUTATION_KEYS
        if key in was and key in now and was[key] != now[key]
    ]
    if changed:
        raise TrainingError(f"{name} belongs to another model: {', '.join(changed)}", fix=FIX)


def check_tensors(
    name: str, here: Mapping[str, torch.Size], saved: Mapping[str, torch.Size]
) -> None:
    """Raises TrainingError with all tensors of this rank that are missing in the checkpoint or have
    another shape, and all saved moments that the optimizer does not have."""
    wrong = [key for key, size in here.items() if size != saved.get(key)]
    unknown = [key for key in saved if key not in here and _weight_of(key) in here]
    if not wrong and not unknown:
        return
    differences = [
        f"{key} is {_shape_text(saved.get(key))} in the checkpoint and"
        f" {_shape_text(here.get(key))} in the job"
        for key in (*wrong, *unknown)
    ]
    raise TrainingError(
        f"{name} belongs to another {_kind(wrong)}: {listed(differences)}",
        fix=FIX,
    )


def _weight_of(name: str) -> str | None:
    """The weight that the optimizer moment `name` belongs to; None if `name` is not a moment."""
    if not name.startswith(OPTIMIZER):
        return None
    return MODEL + name.removeprefix(OPTIMIZER).rpartition(".")[0]


def _kind(wrong: Iterable[str]) -> str:
    """The most likely explanation of the differences."""
    return "model" if any(name.startswith(MODEL) for name in wrong) else "optimizer"


def _shape_text(size: torch.Size | None) -> str:
    return "missing" if size is None else f"of shape {tuple(size)}"


def check_stream(name: str, saved: Stream, here: Stream) -> None:
    """Raises TrainingError if the data changed: the job would skip samples or read some twice."""
    values = [(key, getattr(saved, field), getattr(here, field)) for field, key in KEYS.items()]
    changed = [f"{key} was {was} and is now {now}" for key, was, now in values if was != now]
    # Samples of another length are other data, also of the same files.
    if saved.data != here.data and saved.sequence_length == here.sequence_length:
        changed.append(OTHER_DATA)
    if changed:
        raise TrainingError(
            f"{name} belongs to a run with other data or settings: {'; '.join(changed)}",
            fix="restore them, or start in another directory",
        )
