"""Finds the newest step of which every rank has a complete checkpoint in its host's memory."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version

import torch
import torch.distributed as dist

from orchestrator.contract.codec import encode
from orchestrator.contract.files.checkpoint_names import Made, SkippedCheckpoint
from orchestrator.contract.files.trainer_config import TrainingConfig
from orchestrator.contract.memory.peers import HostMemory
from orchestrator.contract.memory.slot_file import is_history
from orchestrator.contract.skipped_batches import Window, already_read, batch_of
from trainer.checkpoint.memory.slot import Header, Slot
from trainer.checkpoint.state import Progress

FORMAT = 2
"""Of the slots. Another one is not read."""


@dataclass(frozen=True, slots=True)
class InMemory:
    """This rank's part of a step that all ranks have."""

    slot: Slot
    header: Header

    @property
    def progress(self) -> Progress:
        return Progress.from_json(self.header.progress)


def digest_of(config: TrainingConfig) -> str:
    """Names everything on which the shards of a rank depend. Any changed key changes it, also one
    that does not matter: then the disk is read, which is never wrong. So does another version of
    torch or ndctl, which may lay out a shard in another way."""
    versions = (torch.__version__, version("ndctl"), FORMAT)
    return hashlib.sha256(json.dumps([encode(config), *versions]).encode()).hexdigest()


def newest_in_memory(
    slots: Sequence[Slot],
    memory: HostMemory,
    config: str,
    rank: int,
    skip: Sequence[Window],
) -> tuple[InMemory | None, tuple[SkippedCheckpoint, ...]]:
    """This rank's part of the newest step that all ranks have, and the newer steps that are
    skipped, the same on every rank. A collective.

    Args:
        config: as `digest_of` returns it.
        skip: data to skip; a step that has read some of it is not used.
    """
    own = _usable(slots, memory, config, rank)
    others = sorted(_of_other_configuration(slots, memory, config))
    everyone: list[tuple[list[Made], list[int]]] = [([], [])] * dist.get_world_size()
    dist.all_gather_object(everyone, (sorted(own), others))
    common = set(everyone[0][0]).intersection(*(made for made, _ in everyone[1:]))
    skipped: list[SkippedCheckpoint] = []
    for made in sorted(common, reverse=True):
        why = _defect_on_any_rank(own[made], rank, skip)
        if why is None:
            return own[made], tuple(skipped)
        skipped.append(SkippedCheckpoint(f"step-{made.step} in memory", why))
    if not common and (steps := {step for _, steps in everyone for step in steps}):
        why = "it was made with another plan, configuration or version"
        skipped.append(SkippedCheckpoint(f"step-{max(steps)} in memory", why))
    return None, tuple(skipped)


def _usable(
    slots: Sequence[Slot], memory: HostMemory, config: str, rank: int
) -> Mapping[Made, InMemory]:
    headers = [(slot, slot.header()) for slot in slots]
    return {
        header.made: InMemory(slot, header)
        for slot, header in headers
        if header is not None
        and (header.lineage, header.config, header.rank) == (memory.lineage, config, rank)
        and is_history(header.made, memory.resumed)
    }


def _of_other_configuration(
    slots: Sequence[Slot], memory: HostMemory, config: str
) -> Iterator[int]:
    """Steps in memory that this attempt cannot use, because its shards are others."""
    for slot in slots:
        header = slot.header()
        if header is not None and header.lineage == memory.lineage and header.config != config:
            yield header.made.step


def _defect_on_any_rank(found: InMemory, rank: int, skip: Sequence[Window]) -> str | None:
    defects: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(defects, _defect(found, rank, skip))
    return next((defect for defect in defects if defect), None)


def _defect(found: InMemory, rank: int, skip: Sequence[Window]) -> str | None:
    progress = found.progress
    read = already_read(progress.step, progress.skipped, skip)
    if read:
        last = batch_of(progress.step, progress.skipped)
        return f"it has read batches up to {last}, but batches {read[0]} must be skipped"
    if found.slot.digest(found.header.table) != found.header.digest:
        return f"the copy of rank {rank} has changed since it was made"
    return None
