"""The sample ledger records which samples each step read, so that a check can prove it.

Each data rank hashes the pair (position in the stream, sample) of each sample that it read. The sum
of the hashes over all ranks does not depend on the mesh. Rank 0 writes the sum, one line per step,
and one line for each start of the trainer. The check computes the same sum from the seed and the
number of samples. This finds mistakes and lost steps. It does not protect from a forged file.
"""

import json
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from ndctl.rank.fence import Admit, admit_all
from ndctl.rank.line_file import LineFile
from orchestrator.contract.codec import encode
from orchestrator.contract.skipped_batches import Window, batch_of
from orchestrator.contract.spec.limits import AtLeast
from trainer.data.order import Words, mix, samples_at

WORD = (1 << 32) - 1

Count = Annotated[int, AtLeast(1)]


class Sums(NamedTuple):
    """Checksums of the samples of a step, of one rank or of all. They are integers in float64,
    which adds them exactly for up to two million ranks."""

    samples: float
    low: float
    """Sum of the lower halves of the hashes, modulo 2**32 on each rank."""
    high: float

    @property
    def hash(self) -> str:
        return f"{int(self.high) & WORD:08x}{int(self.low) & WORD:08x}"


NOTHING = Sums(0.0, 0.0, 0.0)


class Start(Struct, frozen=True, kw_only=True):
    """The trainer started at step 0 or resumed."""

    attempt: int
    done: Annotated[int, AtLeast(0)] = 0
    """Steps that were done before this start. Earlier lines of later steps no longer count."""
    seed: Annotated[int, AtLeast(0)]
    num_samples: Count
    """Training sequences; each is one sample."""
    global_batch_size: Count
    data: str
    """Fingerprint of the data."""
    skipped: tuple[Window, ...] = ()
    """Batches of the stream that are skipped on purpose, in the past or in the future."""

    def first_of(self, step: int) -> int:
        """Position in the stream of the first sample of `step`."""
        return (batch_of(step, self.skipped) - 1) * self.global_batch_size


class Line(Struct, frozen=True, kw_only=True):
    attempt: int
    step: Count
    first: int
    """Position in the stream, from 0, of the step's first sample."""
    samples: int
    hash: str


class SampleLedger:
    """Written by rank 0 alone."""

    def __init__(self, path: Path, start: Start, admit: Admit = admit_all) -> None:
        self._file = LineFile(path, admit)
        self._start = start
        self._begun = False

    def append(self, *steps: tuple[int, Sums]) -> None:
        """Write the lines of consecutive steps. The sums are over all ranks.

        Raises:
            GivenUp: a later attempt has started; nothing was written.
        """
        # The number of done steps is known only at the first step, so the start line waits for it.
        start = [] if self._begun else [replace(self._start, done=steps[0][0] - 1)]
        self._begun = True
        lines = [self._line(step, sums) for step, sums in steps]
        self._file.append(*map(_to_bytes, [*start, *lines]))

    def _line(self, step: int, sums: Sums) -> Line:
        return Line(
            attempt=self._start.attempt,
            step=step,
            first=self._start.first_of(step),
            samples=int(sums.samples),
            hash=sums.hash,
        )

    def sync(self) -> None:
        """Call it before a checkpoint becomes complete, because its steps are never repeated.

        Raises:
            GivenUp: as `append`.
        """
        self._file.sync()

    def close(self) -> None:
        self._file.close()


def _to_bytes(entry: Struct) -> bytes:
    return json.dumps(encode(entry), separators=(",", ":")).encode() + b"\n"


def sums_of(positions_N: Words, samples_N: Words) -> Sums:
    """Checksums of the samples that one rank read at these positions of the stream."""
    hashes_N = mix(mix(positions_N) ^ samples_N)
    return Sums(len(positions_N), *(float(half) for half in _halves(hashes_N[np.newaxis])[0]))


def expected_hashes(start: Start, first_step: int, num_steps: int) -> list[str]:
    """The hashes that the lines of these steps must have, on any mesh."""
    size = start.global_batch_size
    firsts = [start.first_of(step) for step in range(first_step, first_step + num_steps)]
    firsts_S = np.array(firsts, dtype=np.uint64)
    positions_N = (firsts_S[:, np.newaxis] + np.arange(size, dtype=np.uint64)).reshape(-1)
    samples_N = samples_at(positions_N, start.num_samples, start.seed)
    hashes_SB = mix(mix(positions_N) ^ samples_N).reshape(num_steps, size)
    return [Sums(size, low, high).hash for low, high in _halves(hashes_SB)]


def _halves(hashes_SB: Words) -> list[tuple[int, int]]:
    """Sums, modulo 2**32, of the lower and the upper halves of the hashes in each row."""
    low_S, high_S = (
        (half.sum(axis=1) & WORD).tolist() for half in (hashes_SB & WORD, hashes_SB >> 32)
    )
    return list(zip(low_S, high_S, strict=True))
