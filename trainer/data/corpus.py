"""Text files as one long row of tokens, cut into sequences, and who reads which of them.

What a step reads depends on the seed and the step alone; the mesh only says which rank reads it.
"""

import glob
import hashlib
import os
import sysconfig
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np

from orchestrator.contract.data import DataSpec
from orchestrator.errors import TrainingError

NUM_BYTES = 256
INSTALLED = {"site-packages", "dist-packages", "__pycache__"}


@dataclass(frozen=True, slots=True)
class Corpus:
    """The files one after the other; sequence n begins at byte n * sequence_length."""

    paths: tuple[str, ...]
    ends: tuple[int, ...]
    """Where each file ends in the row of all bytes."""
    sequence_length: int

    @property
    def num_samples(self) -> int:
        """A sequence takes a token more than it feeds: the last token is only ever predicted."""
        return (self.ends[-1] - 1) // self.sequence_length

    @property
    def fingerprint(self) -> str:
        """Changes when the files do, so that a resume on other data is noticed."""
        names = [Path(path).name for path in self.paths]
        return hashlib.sha256(repr((names, self.ends)).encode()).hexdigest()

    def tokens(self, sample: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        """The `sequence_length + 1` tokens of a sample."""
        start = sample * self.sequence_length
        return np.frombuffer(self._read(start, start + self.sequence_length + 1), dtype=np.uint8)

    def _read(self, start: int, stop: int) -> bytes:
        parts = []
        at = bisect_right(self.ends, start)
        while start < stop:
            first, end = self.ends[at - 1] if at else 0, min(stop, self.ends[at])
            parts.append(_read_file(self.paths[at], start - first, end - start))
            start, at = end, at + 1
        return b"".join(parts)


def find_corpus(spec: DataSpec, global_batch_size: int) -> Corpus:
    """The corpus of `spec.files`.

    Raises:
        TrainingError: when there is no data, or less than one global batch of it.
    """
    sizes = [(path, os.path.getsize(path)) for path in find_files(spec.files)]  # noqa: PTH202
    kept = [(path, size) for path, size in sizes if size]
    if not kept:
        raise TrainingError(
            f"data.files {spec.files!r} matches no file with text in it",
            fix="give a glob of text files, for example '{stdlib}/*.py'",
        )
    ends = tuple(accumulate(size for _, size in kept))
    corpus = Corpus(tuple(path for path, _ in kept), ends, spec.sequence_length)
    if corpus.num_samples < global_batch_size:
        raise TrainingError(
            f"data.files {spec.files!r} holds {max(0, corpus.num_samples)} sequences of"
            f" {spec.sequence_length} tokens; one global batch takes {global_batch_size}",
            fix="give more text, shorter sequences or a smaller global batch",
        )
    return corpus


def find_files(pattern: str) -> list[str]:
    """The regular files that `pattern` matches, in the same order on every machine."""
    stdlib = sysconfig.get_paths()["stdlib"]
    found: Iterable[str] = glob.glob(pattern.replace("{stdlib}", stdlib), recursive=True)  # noqa: PTH207 (three times faster)
    if "{stdlib}" in pattern:
        # What pip installed lies inside the library's folder, and is not the library.
        found = [path for path in found if not INSTALLED.intersection(Path(path).parts)]
    return sorted(path for path in found if os.path.isfile(path))  # noqa: PTH113 (as above)


def _read_file(path: str, offset: int, length: int) -> bytes:
    try:
        with Path(path).open("rb") as file:
            file.seek(offset)
            data = file.read(length)
    except OSError as exc:
        raise TrainingError(
            f"{path} cannot be read ({exc}), though rank 0 found it",
            fix="put the data where every host sees it under the same name",
        ) from exc
    if len(data) < length:
        raise TrainingError(
            f"{path} is shorter than rank 0 saw it at the start",
            fix="train on files that nobody writes to, the same on every host",
        )
    return data
