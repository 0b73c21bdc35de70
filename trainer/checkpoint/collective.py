"""One checkpoint, written by all ranks together: shards, manifest, marker, and one outcome."""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save

from orchestrator.contract.files.checkpoint_names import Trained, partial_name
from orchestrator.contract.files.env import RankEnv
from orchestrator.contract.files.run_dir import RunDir
from trainer.checkpoint.commit import Written, commit
from trainer.checkpoint.state import PROGRESS, Progress
from trainer.checkpoint.writer import Writer, why_of
from trainer.rank.fence import admit_of


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a save, the same on every rank."""

    why: str = ""
    """Why it failed; empty for one that is complete."""
    num_bytes: int = 0


def write_together(
    snapshot: dict[str, Any],
    folder: Path,
    step: int,
    env: RankEnv,
    group: dist.ProcessGroup,
) -> Outcome:
    """Write `snapshot` as the complete checkpoint of `step`; never raises for what a disk does."""
    partial = folder / partial_name(step, env.attempt)
    if env.rank == 0:
        # The others write only after rank 0 has joined the save, so after this.
        shutil.rmtree(partial, ignore_errors=True)
    writer = Writer(partial)
    try:
        save(snapshot, storage_writer=writer, process_group=group)
        outcome = _complete(partial, writer.files.written, _trained(snapshot), step, env, group)
    # torch's CheckpointException, which all ranks get when one has failed, is not an Exception.
    except (Exception, CheckpointException) as exc:  # noqa: BLE001 (told by the caller)
        outcome = Outcome(why_of(exc, partial))
    if outcome.why and env.rank == 0:
        # What was written of it may be what fills the disk.
        shutil.rmtree(partial, ignore_errors=True)
    return outcome


def _trained(snapshot: Mapping[str, Any]) -> Trained | None:
    """What the marker tells of `Progress`, which is in the shards, to those without torch."""
    if PROGRESS not in snapshot:
        return None
    progress = Progress.from_json(snapshot[PROGRESS])
    return Trained(
        config=progress.origin.config,
        lora=progress.origin.lora,
        seed=progress.stream.seed,
        global_batch_size=progress.stream.global_batch_size,
        sequence_length=progress.stream.sequence_length,
    )


def _complete(
    partial: Path,
    written: dict[str, Written],
    trained: Trained | None,
    step: int,
    env: RankEnv,
    group: dist.ProcessGroup,
) -> Outcome:
    """Gather what each rank wrote, let rank 0 complete it, and tell all how that went."""
    first = env.rank == 0
    everyones: list[Any] | None = [None] * env.world_size if first else None
    dist.gather_object(written, everyones, dst=0, group=group)
    answer: list[Any] = [None]
    if everyones is not None:
        files = {name: file for each in everyones for name, file in each.items()}
        try:
            admit_of(RunDir(partial.parent.parent), env)()
            commit(
                partial, files, trained, step=step, attempt=env.attempt, world_size=env.world_size
            )
            answer = [Outcome(num_bytes=sum(file.size for file in files.values()))]
        except OSError as exc:
            answer = [Outcome(why_of(exc, partial))]
    dist.broadcast_object_list(answer, src=0, group=group)
    outcome: Outcome = answer[0]
    return outcome
