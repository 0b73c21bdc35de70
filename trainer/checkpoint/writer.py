"""Writes the files of a checkpoint as torch lays them out, and learns what torch does not tell.

That is each file's checksum, taken of the very bytes on their way to the disk; and why a write
failed, for torch reports a full disk as a zip archive of unexpected length.
"""

import errno
import hashlib
import io
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter

from trainer.checkpoint.commit import Written

NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
MOST_WORDS = 300


class Writer(FileSystemWriter):
    """Writes and syncs one rank's files of one checkpoint."""

    def __init__(self, folder: Path) -> None:
        # Nothing is copied ahead: that would be on streams of whichever device the thread has.
        super().__init__(folder, sync_files=True, per_thread_copy_ahead=0)
        self.files = WatchedFiles()
        self.fs = self.files

    def write_data(self, plan: Any, planner: Any) -> Any:
        try:
            return super().write_data(plan, planner)
        except RuntimeError as exc:
            if self.files.error is None:
                raise
            raise self.files.error from exc


class WatchedFiles(FileSystem):
    """Remembers what was written, and the first error in writing it."""

    def __init__(self) -> None:
        self.written: dict[str, Written] = {}
        self.error: OSError | None = None

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        """A run directory that was moved or removed is not made again."""
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
            # All that torch asks of a stream that it writes to.
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
        self._sha256.update(data)
        self._size += memoryview(data).nbytes
        # Here, for torch does not let through what is raised.
        with self._files.remembering(self._path):
            return self._raw.write(data)

    def flush(self) -> None:
        self._raw.flush()

    def close(self) -> None:
        self._raw.close()

    def tell(self) -> int:
        return self._size

    def fileno(self) -> int:
        # Asked for in order to sync the file: all of it must be with the kernel by then.
        self.flush()
        return self._raw.fileno()

    def so_far(self) -> Written:
        return Written(self._size, self._sha256.hexdigest())


def why_of(error: BaseException, folder: Path) -> str:
    """Why a save into `folder` failed, in one line: path, cause, and room where that ran out."""
    who = ""
    if isinstance(error, CheckpointException) and error.failures:
        rank, (error, _) = min(error.failures.items(), key=lambda item: item[0])
        who = f"rank {rank}: "
    if not isinstance(error, OSError) or error.strerror is None:
        text = " ".join(str(error).split())
        return f"{who}{type(error).__name__}: {text[:MOST_WORDS]}"
    room = f" ({_room(folder)})" if error.errno in NO_SPACE else ""
    return f"{who}{error.strerror}: {error.filename or folder}{room}"


def _room(folder: Path) -> str:
    here = next(path for path in (folder, *folder.parents) if path.exists())
    usage = shutil.disk_usage(here)
    return f"{usage.free / 2**20:,.1f} of {usage.total / 2**20:,.1f} MiB free"
