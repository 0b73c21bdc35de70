"""Finds the newest step of which every rank has a complete checkpoint in its host's memory."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch.distributed as dist

from orchestrator.contract.codec import encode
from orchestrator.contract.files.checkpoint_names import SkippedCheckpoint
from orchestrator.contract.files.env import HostMemory
from orchestrator.contract.files.trainer_config import TrainingConfig
from orchestrator.contract.skipped_batches import Window, already_read, batch_of
from trainer.checkpoint.memory.slot import Header, Slot
from trainer.checkpoint.state import Progress


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
    that does not matter: then the disk is read, which is never wrong."""
    return hashlib.sha256(json.dumps(encode(config)).encode()).hexdigest()


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
    own = _usable(slots, memory.lineage, config, rank)
    everyone: list[list[int]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, sorted(own))
    common = set(everyone[0]).intersection(*everyone[1:])
    skipped: list[SkippedCheckpoint] = []
    for step in sorted(common, reverse=True):
        why = _defect_on_any_rank(own[step], rank, skip)
        if why is None:
            return own[step], tuple(skipped)
        skipped.append(SkippedCheckpoint(f"step-{step} in memory", why))
    return None, tuple(skipped)


def _usable(slots: Sequence[Slot], lineage: int, config: str, rank: int) -> Mapping[int, InMemory]:
    headers = [(slot, slot.header()) for slot in slots]
    return {
        header.step: InMemory(slot, header)
        for slot, header in headers
        if header is not None
        and (header.lineage, header.config, header.rank) == (lineage, config, rank)
    }


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
