"""Finds the newest checkpoint that is whole, and loads it cut for the mesh of this attempt."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as load_shards

from orchestrator.contract.files.checkpoint_names import (
    SkippedCheckpoint,
    defect_of,
    newest_complete,
    read_marker,
)
from orchestrator.contract.skipped_batches import Window, already_read, batch_of, merge_windows
from orchestrator.errors import TrainingError
from trainer.checkpoint.read import CheckpointReader, unreadable
from trainer.checkpoint.state import (
    MODEL,
    OPTIMIZER,
    Origin,
    Progress,
    Stream,
    TrainingState,
)
from trainer.checkpoint.verify import verify_together
from trainer.listing import listed
from trainer.rank.emit import Reporter
from trainer.rank.ranks import Ranks, on_all_ranks, shared_from_first

LOG = logging.getLogger("trainer")

FIX = "go on with the model, optimizer and LoRA of the checkpoint, or start in another directory"
ADAPTER = ".lora_"
"""In the name of every weight that PEFT's LoRA adds."""
WORKINGS = (
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
"""Keys of a model's config that change what it computes and not always the shape of a tensor."""


@dataclass(frozen=True, slots=True)
class Found:
    folder: Path | None
    """What to go on from; None to begin at step 0."""
    passed_over: tuple[SkippedCheckpoint, ...]
    skip: Sequence[Window] = ()
    """Data to be left out, of which nothing was read yet."""


def find_checkpoint(
    checkpoints: Path, ranks: Ranks, *, verify: bool, skip: Sequence[Window] = ()
) -> Found:
    """The newest complete checkpoint that has read nothing of what is to be skipped, with `verify`
    the newest such whose files are as they were written; the same on every rank.

    Raises:
        TrainingError: on every rank, when each has read some of it, and it does not begin with the
            first batch: to start over would throw away what was trained before.
    """
    if not ranks.env.resume:
        return Found(None, shared_from_first(partial(_of_another_run, checkpoints)), skip)
    refused: dict[str, str] = {}
    too_late: list[str] = []
    while True:
        # Rank 0 decides: another host may see a shared folder a moment later.
        folder, passed = shared_from_first(lambda: newest_complete(checkpoints, refused))
        if folder is None and too_late and not any(window.first == 1 for window in skip):
            raise _all_too_late(too_late, skip)
        if folder is None:
            return Found(None, passed, skip)
        defect = verify_together(folder, ranks.env) if verify else None
        if defect is None and skip:
            defect = shared_from_first(partial(_has_read, folder, skip))
            too_late += [folder.name] if defect else []
        if defect is None:
            return Found(folder, passed, skip)
        refused[folder.name] = defect


def _of_another_run(checkpoints: Path) -> tuple[SkippedCheckpoint, ...]:
    names = [folder.name for folder in checkpoints.glob("step-*") if not defect_of(folder)]
    return tuple(
        SkippedCheckpoint(name, "the job's journal does not know it") for name in sorted(names)
    )


def _has_read(folder: Path, skip: Sequence[Window]) -> str | None:
    """Which of the data to be skipped is in the weights of this checkpoint already, if any."""
    progress = CheckpointReader(folder).progress()
    read = already_read(progress.step, progress.skipped, skip)
    if not read:
        return None
    last = batch_of(progress.step, progress.skipped)
    return f"it has read up to batch {last}, and batches {read[0]} are to be skipped"


def _all_too_late(names: Sequence[str], skip: Sequence[Window]) -> TrainingError:
    return TrainingError(
        f"every checkpoint ({listed(names)}) has read some of the batches to be skipped"
        f" ({', '.join(map(str, skip))}): none is from before them",
        fix="keep more of them (checkpoint.keep), and resume without skipping: ndctl submit SPEC"
        " --resume --set resilience.on_nan=stop",
    )


def resume(
    found: Found, state: TrainingState, reporter: Reporter
) -> tuple[int, tuple[Window, ...]]:
    """Load what there is to go on from; returns the steps that are done, and what data is left
    out: by those who made the checkpoint, or from now on."""
    step, there = load(found.folder, state) if found.folder else (0, ())
    reporter.step = step
    if state.ranks.env.rank == 0:
        for passed in found.passed_over:
            LOG.warning("passed over checkpoint %s: %s", passed.name, passed.why)
        if found.folder:
            LOG.info("resumed from %s", found.folder)
        else:
            LOG.info("starting at step 0")
        reporter.resumed(step, found.passed_over)
    return step, merge_windows(there, found.skip)


def load(folder: Path, state: TrainingState) -> tuple[int, tuple[Window, ...]]:
    """Load `folder` into `state`; returns its step, and what data was left out.

    Raises:
        TrainingError: on every rank, when it cannot be read or is of another model, optimizer or
            data.
    """
    progress, world_size, there = shared_from_first(lambda: _contents(folder))
    check_model(folder, progress.origin, state.origin)
    check_stream(folder, progress.stream, state.stream)
    tensors = state.tensors()
    here = {name: tensor.shape for name, tensor in tensors.items()}
    # Which tensors a rank has depends on its pipeline stage.
    on_all_ranks(lambda: check_tensors(folder, here, there))
    random = state.random() if world_size == state.ranks.env.world_size else {}
    values: dict[str, Any] = {**tensors, **random}
    try:
        load_shards(values, checkpoint_id=folder)
    except CheckpointException as exc:
        # It is no Exception, and would pass by everyone who wants to tell of one.
        raise unreadable(folder, exc) from exc
    state.set_random({name: values[name] for name in random})
    state.skips.restore(progress.skips)
    state.spikes.restore(progress.spikes)
    return progress.step, progress.skipped


def _contents(folder: Path) -> tuple[Progress, int, dict[str, torch.Size]]:
    reader = CheckpointReader(folder)
    return reader.progress(), read_marker(folder)["world_size"], reader.shapes


def check_model(folder: Path, there: Origin, here: Origin) -> None:
    """Raises TrainingError where the models differ in what no tensor's shape tells."""
    was, now = there.config, here.config
    changed = [
        f"{key} was {was[key]} and is {now[key]}"
        for key in WORKINGS
        if key in was and key in now and was[key] != now[key]
    ]
    if changed:
        raise TrainingError(f"{folder} is of another model: {', '.join(changed)}", fix=FIX)


def check_tensors(
    folder: Path, here: Mapping[str, torch.Size], there: Mapping[str, torch.Size]
) -> None:
    """Raises TrainingError naming what is trained here and not in `folder`, or in another shape,
    and the moments there that the optimizer here does not know."""
    wrong = [name for name, size in here.items() if size != there.get(name)]
    unknown = [name for name in there if name not in here and _weight_of(name) in here]
    if not wrong and not unknown:
        return
    told = [
        f"{name} is {_words(here.get(name))} here and {_words(there.get(name))} there"
        for name in (*wrong, *unknown)
    ]
    raise TrainingError(
        f"{folder} is of {_kind(wrong, here, there)}: {listed(told)}",
        fix=FIX,
    )


def _weight_of(name: str) -> str | None:
    """The weight whose moment `name` is."""
    if not name.startswith(OPTIMIZER):
        return None
    return MODEL + name.removeprefix(OPTIMIZER).rpartition(".")[0]


def _kind(wrong: Iterable[str], here: Iterable[str], there: Iterable[str]) -> str:
    if not any(name.startswith(MODEL) for name in wrong):
        return "another optimizer"
    adapters = [any(ADAPTER in name for name in names) for names in (here, there)]
    if adapters == [True, False]:
        return "a run that trained all weights and not adapters alone"
    if adapters == [False, True]:
        return "a run that trained adapters alone"
    return "another model"


def _words(size: torch.Size | None) -> str:
    return "missing" if size is None else f"of shape {tuple(size)}"


def check_stream(folder: Path, there: Stream, here: Stream) -> None:
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
