"""The sample ledger: which samples every step truly read, and the check that they were the right
ones.

Each data rank hashes (position in the stream, sample) of what it read. The sum over all ranks does
not depend on the mesh; the first rank writes it down, a line per step, and before them a line for
each start of the trainer. Whoever knows the seed and the number of samples can compute it again.
This finds mistakes and lost steps; it is no protection from someone who forges the file.
"""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np

from orchestrator.contract.skipped_batches import Window, batch_of
from orchestrator.contract.spec.limits import AtLeast
from trainer.data.order import Words, mix, samples_at
from trainer.measure.lines import LineFile
from trainer.rank.fence import Admit, admit_all

WORD = (1 << 32) - 1

Count = Annotated[int, AtLeast(1)]


class Sums(NamedTuple):
    """What was read in a step, by a rank or by all: whole numbers, added up exactly in float64 for
    up to two million ranks."""

    samples: float
    low: float
    """Sum of the lower halves of the hashes, modulo 2**32 on each rank."""
    high: float

    @property
    def hash(self) -> str:
        return f"{int(self.high) & WORD:08x}{int(self.low) & WORD:08x}"


NOTHING = Sums(0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """The trainer began, or went on."""

    attempt: int
    done: Annotated[int, AtLeast(0)] = 0
    """Steps that are done; lines of later ones, further up, no longer count."""
    seed: Annotated[int, AtLeast(0)]
    num_samples: Count
    """Sequences that are trained on, of which samples are drawn."""
    global_batch_size: Count
    data: str
    """Fingerprint of the data."""
    skipped: tuple[Window, ...] = ()
    """Batches of the stream that were left out on purpose, or are yet to be."""

    def first_of(self, step: int) -> int:
        """Where in the stream `step` begins."""
        return (batch_of(step, self.skipped) - 1) * self.global_batch_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    attempt: int
    step: Count
    first: int
    """Position in the stream, from 0, of the step's first sample."""
    samples: int
    hash: str


class SampleLedger:
    """Written by the first rank."""

    def __init__(self, path: Path, start: Start, admit: Admit = admit_all) -> None:
        self._file = LineFile(path, admit)
        self._start = start
        self._begun = False

    def append(self, step: int, sums: Sums) -> None:
        """Write down what all ranks together read in `step`."""
        if not self._begun:
            self._write(replace(self._start, done=step - 1))
            self._begun = True
        line = Line(
            attempt=self._start.attempt,
            step=step,
            first=self._start.first_of(step),
            samples=int(sums.samples),
            hash=sums.hash,
        )
        self._write(line)

    def sync(self) -> None:
        """To be called before a checkpoint counts: its steps are never done again."""
        self._file.sync()

    def _write(self, entry: Start | Line) -> None:
        self._file.append(json.dumps(asdict(entry), separators=(",", ":")).encode() + b"\n")


def sums_of(positions_N: Words, samples_N: Words) -> Sums:
    """Of the samples that one rank read, each at its position in the stream."""
    hashes_N = mix(mix(positions_N) ^ samples_N)
    return Sums(len(positions_N), *(float(half) for half in _halves(hashes_N[np.newaxis])[0]))


def expected_hashes(start: Start, first_step: int, num_steps: int) -> list[str]:
    """What the lines of these steps must say, whatever the mesh."""
    size = start.global_batch_size
    firsts = [start.first_of(step) for step in range(first_step, first_step + num_steps)]
    firsts_S = np.array(firsts, dtype=np.uint64)
    positions_N = (firsts_S[:, np.newaxis] + np.arange(size, dtype=np.uint64)).reshape(-1)
    samples_N = samples_at(positions_N, start.num_samples, start.seed)
    hashes_SB = mix(mix(positions_N) ^ samples_N).reshape(num_steps, size)
    return [Sums(size, low, high).hash for low, high in _halves(hashes_SB)]


def _halves(hashes_SB: Words) -> list[tuple[int, int]]:
    """Lower and upper halves of the hashes of each row, added up modulo 2**32."""
    low_S, high_S = (
        (half.sum(axis=1) & WORD).tolist() for half in (hashes_SB & WORD, hashes_SB >> 32)
    )
    return list(zip(low_S, high_S, strict=True))
