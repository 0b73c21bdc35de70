"""Reads parts of a checkpoint in one process, without collectives."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from orchestrator.errors import TrainingError
from trainer.checkpoint.state import PROGRESS, Progress


class CheckpointReader:
    """The content of the complete checkpoint `folder`.

    Raises:
        TrainingError: reading failed. All methods raise it too.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            self._reader = _CachedMetadataReader(folder)
        except Exception as exc:  # unpickling a damaged file can raise anything
            raise self._unreadable(exc) from exc

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """Shape of each tensor."""
        entries = self._reader.metadata.state_dict_metadata
        return {n: e.size for n, e in entries.items() if isinstance(e, TensorStorageMetadata)}

    def tensors(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """The whole tensors, assembled from the shards of all ranks."""
        entries = self._reader.metadata.state_dict_metadata
        whole: dict[str, torch.Tensor] = {}
        for name in names:
            entry = entries[name]
            assert isinstance(entry, TensorStorageMetadata)
            whole[name] = torch.empty(entry.size, dtype=entry.properties.dtype)
        self._read(whole)
        return whole

    def progress(self) -> Progress:
        values: dict[str, Any] = {PROGRESS: ""}
        self._read(values)
        return Progress.from_json(values[PROGRESS])

    def _read(self, values: dict[str, Any]) -> None:
        try:
            _load_state_dict(values, self._reader, no_dist=True)
        # torch's CheckpointException is not an Exception.
        except (Exception, CheckpointException) as exc:
            raise self._unreadable(exc) from exc

    def _unreadable(self, exc: BaseException) -> TrainingError:
        return unreadable(self._folder, exc)


def unreadable(name: object, exc: BaseException) -> TrainingError:
    last = str(exc).strip().splitlines()[-1:]
    return TrainingError(
        f"failed to load {name}: {type(exc).__name__}: {''.join(last)}",
        fix="set checkpoint.verify to true to skip damaged checkpoints, or move this one away",
    )


class _CachedMetadataReader(FileSystemReader):
    """Reads the metadata once instead of at each load."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.metadata: Metadata = super().read_metadata()

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.metadata
