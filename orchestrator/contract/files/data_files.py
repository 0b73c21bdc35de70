"""Finds the files of a data spec and their format by name.

The trainer opens the files, and `ndctl submit` checks that they exist before the job is queued.
Both use these rules.
"""

import glob
import os
import stat
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Literal

from msgspec import Struct

Format = Literal["text", "jsonl", "parquet", "dataset", "tokens"]
INSTALLED = {"site-packages", "dist-packages", "__pycache__"}
ENDINGS: dict[str, Format] = {".jsonl": "jsonl", ".parquet": "parquet", ".tokens": "tokens"}
SAVED_DATASET = "state.json"
"""File that save_to_disk of the library datasets writes into a folder."""
SAVED_SPLITS = "dataset_dict.json"


class File(Struct, frozen=True):
    """A regular file, or the folder of a dataset."""

    path: str
    size: int
    """In bytes; for a dataset, of all its files together."""
    changed_ns: int
    inode: tuple[int, int]
    """Device and inode; equal if two names refer to the same file."""
    is_dataset: bool


class Found(Struct, frozen=True):
    format: Format
    files: tuple[File, ...]

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)

    def without(self, others: "Found") -> "Found":
        """The files that are not in `others`, so that held-out data is not trained on."""
        held_out = {file.inode for file in others.files}
        return Found(self.format, tuple(f for f in self.files if f.inode not in held_out))


class UnusableFiles(ValueError):
    """A glob that finds no usable files. `said` completes "<glob> …", `fix` says what to do."""

    def __init__(self, said: str, fix: str) -> None:
        super().__init__(said)
        self.said = said
        self.fix = fix


def find(pattern: str, format_: Format | Literal["auto"], most: int | None = None) -> Found:
    """The files that `pattern` matches, in the same order on every machine, and their format.

    Args:
        most: stop after this many files; for callers that only ask whether there are any.

    Raises:
        UnusableFiles: no file has content, or the files have several formats.
    """
    files = list(islice(_all(pattern), most))
    if format_ == "auto":
        format_ = _only_format(files)
    files = [file for file in files if file.is_dataset == (format_ == "dataset")]
    if not files:
        raise UnusableFiles(
            f"matches no file with content{_hint(pattern)}",
            "give a glob of text, .jsonl, .parquet or .tokens files, for example '{stdlib}/*.py',"
            " or a folder that datasets' save_to_disk wrote",
        )
    return Found(format_, tuple(files))


def _all(pattern: str) -> Iterator[File]:
    return (file for path in sorted(expand(pattern)) if (file := look_at(path)) is not None)


def expand(pattern: str) -> Iterable[str]:
    """The paths that `pattern` matches; `{stdlib}` is Python's own library."""
    stdlib = sysconfig.get_paths()["stdlib"]
    found = glob.glob(pattern.replace("{stdlib}", stdlib), recursive=True)  # noqa: PTH207 (three times faster)
    if "{stdlib}" in pattern:
        # site-packages is inside the library's folder but is not part of the library.
        return [path for path in found if not INSTALLED.intersection(Path(path).parts)]
    return found


def look_at(path: str) -> File | None:
    """The file at `path`; None for an empty file or a folder that is not a dataset."""
    try:
        status = os.stat(path)  # noqa: PTH116 (as above)
        if stat.S_ISDIR(status.st_mode):
            return _dataset(path, status)
    except OSError as exc:
        raise UnusableFiles(
            f"matches {path}, which cannot be read: {exc.strerror}",
            "fix the link or the permissions, or narrow the glob down",
        ) from exc
    if not stat.S_ISREG(status.st_mode) or not status.st_size:
        return None
    return File(path, status.st_size, status.st_mtime_ns, (status.st_dev, status.st_ino), False)


def _dataset(path: str, folder: os.stat_result) -> File | None:
    if not Path(path, SAVED_DATASET).is_file():
        return None
    parts = [part.stat() for part in Path(path).iterdir()]
    size, changed = sum(p.st_size for p in parts), max(p.st_mtime_ns for p in parts)
    return File(path, size, changed, (folder.st_dev, folder.st_ino), True)


def _only_format(files: Sequence[File]) -> Format:
    kinds = {
        "dataset" if file.is_dataset else ENDINGS.get(Path(file.path).suffix, "text")
        for file in files
    }
    if len(kinds) > 1:
        raise UnusableFiles(
            f"matches files of several formats: {', '.join(sorted(kinds))}",
            "set data.format, or narrow the glob down to files of one format",
        )
    return kinds.pop() if kinds else "text"


def _hint(pattern: str) -> str:
    if pattern.startswith("~"):
        return "; ~ is not expanded: write the path of the home folder"
    folder = Path(pattern)
    if (folder / SAVED_SPLITS).is_file():
        splits = sorted(p.parent.name for p in folder.glob(f"*/{SAVED_DATASET}"))
        return f"; it is a folder of splits ({', '.join(splits)}): add the name of one to the path"
    return "; it is a folder: add '/*' or '/**' and a file name ending" if folder.is_dir() else ""
