"""Writes one checkpoint on all ranks together: shards, manifest and marker."""

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save

from ndctl.rank.checkpoint_files import Written, commit, partial_name
from orchestrator.contract.codec import encode
from orchestrator.contract.files.checkpoint_names import Trained
from orchestrator.contract.files.env import RankEnv
from orchestrator.contract.files.run_dir import RunDir
from trainer.checkpoint.pace import Pace
from trainer.checkpoint.state import PROGRESS, Progress
from trainer.checkpoint.writer import Writer, why_of
from trainer.rank.fence import admit_of


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of a save, the same on every rank."""

    why: str = ""
    """Why it failed; empty if the checkpoint is complete."""
    num_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where checkpoints are written, and by which ranks."""

    folder: Path
    env: RankEnv
    group: dist.ProcessGroup
    before_commit: Callable[[], None] = lambda: None
    """Called on rank 0 before a checkpoint becomes complete. An OSError makes the save fail."""


def write_on_all_ranks(
    snapshot: dict[str, Any], step: int, target: Target, pace: Pace | None = None
) -> Outcome:
    """Write `snapshot` as the complete checkpoint of `step`. I/O errors are in the outcome."""
    env = target.env
    partial = target.folder / partial_name(step, env.attempt)
    if env.rank == 0:
        # Other ranks write only after rank 0 has joined `save`, so none of their files
        # exists yet.
        shutil.rmtree(partial, ignore_errors=True)
    writer = Writer(partial, pace)
    try:
        save(snapshot, storage_writer=writer, process_group=target.group)
        outcome = _complete(partial, writer.files.written, _trained(snapshot), step, target)
    # If one rank fails, all get torch's CheckpointException, which is not an Exception.
    except (Exception, CheckpointException) as exc:  # noqa: BLE001 (the caller reports it)
        outcome = Outcome(why_of(exc, partial))
    if outcome.why and env.rank == 0:
        # Free the space, because the partial files may be what filled the disk.
        shutil.rmtree(partial, ignore_errors=True)
    return outcome


def _trained(snapshot: Mapping[str, Any]) -> Trained | None:
    """The part of `Progress` that the marker repeats, for readers without torch."""
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
    target: Target,
) -> Outcome:
    """Gather the file lists on rank 0, which completes the checkpoint and broadcasts the
    outcome."""
    env, group = target.env, target.group
    written_by_rank: list[Any] | None = [None] * env.world_size if env.rank == 0 else None
    dist.gather_object(written, written_by_rank, dst=0, group=group)
    answer: list[Any] = [None]
    if written_by_rank is not None:
        files = {name: file for each in written_by_rank for name, file in each.items()}
        try:
            target.before_commit()
            # If a newer attempt has started, this one must not add a checkpoint.
            admit_of(RunDir(partial.parent.parent), env)()
            commit(
                partial,
                files,
                {} if trained is None else {"trained": encode(trained)},
                step=step,
                attempt=env.attempt,
                world_size=env.world_size,
            )
            answer = [Outcome(num_bytes=sum(file.size for file in files.values()))]
        except OSError as exc:
            answer = [Outcome(why_of(exc, partial))]
    dist.broadcast_object_list(answer, src=0, group=group)
    outcome: Outcome = answer[0]
    return outcome
