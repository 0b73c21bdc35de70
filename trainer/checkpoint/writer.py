"""Writes the files of a checkpoint in torch's layout, and records what torch does not report.

It records the checksum of each file, computed from the bytes as they are written, and the cause of
a failed write: torch reports a full disk as a zip archive of unexpected length.
"""

import hashlib
import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.utils.serialization import config as serialization_config

from ndctl.rank.checkpoint_files import Written
from orchestrator.contract.files.atomic_write import NO_SPACE, free_space
from trainer.checkpoint.pace import Pace

MAX_CHARS = 300
PIECE_BYTES = 1 << 19
"""Bytes written at a time. Writes of 2 MiB and more can take Linux 6.18 three to five times the
processor time on ext4. After its checksum, a piece of this size is still in the processor's cache
when it is written."""


class Writer(FileSystemWriter):
    """Writes and syncs one rank's files of one checkpoint."""

    def __init__(self, folder: Path, pace: Pace | None = None) -> None:
        # No copy-ahead: it would use a stream of this thread's current device, which may be GPU 0.
        super().__init__(folder, sync_files=True, per_thread_copy_ahead=0)
        self.files = WatchedFiles(pace)
        self.fs = self.files

    def write_data(self, plan: Any, planner: Any) -> Any:
        try:
            # Files have a SHA-256, so the CRC of each tensor, a third of all work, is left out.
            settings: Any = serialization_config  # torch has no types for `patch`
            with settings.patch("save.compute_crc32", False):
                return super().write_data(plan, planner)
        except RuntimeError as exc:
            if self.files.error is None:
                raise
            # torch hides the OSError of a write behind its own RuntimeError.
            raise self.files.error from exc


class WatchedFiles(FileSystem):
    """Records the written files and the first write error."""

    def __init__(self, pace: Pace | None = None) -> None:
        self.pace = pace
        """None: as fast as possible."""
        self.written: dict[str, Written] = {}
        self.error: OSError | None = None

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        """Fails if the run directory is missing, so that a moved one is not created again."""
        run = Path(path).parent.parent
        with self.remembering(run):
            run.stat()
        super().mkdir(path)

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        with self.remembering(Path(path)), super().create_stream(path, mode) as raw:
            if "w" not in mode:
                yield raw
                return
            watched = _Watched(cast(io.BufferedWriter, raw), Path(path), self)
            # It has only those methods of a stream that torch calls when it writes.
            yield cast(io.IOBase, watched)
        self.written[Path(path).name] = watched.so_far()

    @contextmanager
    def remembering(self, path: Path) -> Iterator[None]:
        try:
            yield
        except OSError as exc:
            exc.filename = exc.filename or str(path)
            self.error = self.error or exc
            raise

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.written[Path(new_path).name] = self.written.pop(Path(path).name)


class _Watched:
    """A file being written, front to back."""

    def __init__(self, raw: io.BufferedWriter, path: Path, files: WatchedFiles) -> None:
        self._raw = raw
        self._path = path
        self._files = files
        self._sha256 = hashlib.sha256()
        self._size = 0

    def write(self, data: Any) -> int:
        given = memoryview(data).cast("B")
        self._size += given.nbytes
        # Recorded here, because torch does not pass the exception on.
        with self._files.remembering(self._path):
            for start in range(0, given.nbytes, PIECE_BYTES):
                piece = given[start : start + PIECE_BYTES]
                self._sha256.update(piece)
                self._raw.write(piece)
                if self._files.pace is not None:
                    self._files.pace.keep()
        return given.nbytes

    def flush(self) -> None:
        self._raw.flush()

    def close(self) -> None:
        self._raw.close()

    def tell(self) -> int:
        return self._size

    def fileno(self) -> int:
        # torch asks for the descriptor to sync the file, so all data must be in the kernel first.
        self.flush()
        return self._raw.fileno()

    def so_far(self) -> Written:
        return Written(self._size, self._sha256.hexdigest())


def why_of(error: BaseException, folder: Path) -> str:
    """Why a save into `folder` failed, in one line: cause, path, and free space if it ran out."""
    rank_prefix = ""
    if isinstance(error, CheckpointException) and error.failures:
        rank, (error, _) = min(error.failures.items(), key=lambda item: item[0])
        rank_prefix = f"rank {rank}: "
    if not isinstance(error, OSError) or error.strerror is None:
        text = " ".join(str(error).split())
        return f"{rank_prefix}{type(error).__name__}: {text[:MAX_CHARS]}"
    space = f" ({free_space(folder)})" if error.errno in NO_SPACE else ""
    return f"{rank_prefix}{error.strerror}: {error.filename or folder}{space}"
