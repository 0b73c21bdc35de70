"""The micro batches that one rank reads for a step or for an evaluation."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from orchestrator.contract.skipped_batches import Window, batch_of
from trainer.data.documents import Documents, documents_at
from trainer.data.ledger import NOTHING, Sums, sums_of
from trainer.data.order import samples_at
from trainer.data.sequences import Sequences
from trainer.data.tokens import Longs
from trainer.model.chunked_loss import NOT_LEARNED

Row = tuple[Longs, Longs, Longs | None]
"""Inputs and labels of a sequence, and `document_starts` if documents are masked."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Token ids, [batch, tokens] each. Under context parallel the tokens are this rank's part of
    each sequence."""

    inputs_BT: torch.Tensor
    labels_BT: torch.Tensor
    """The token after each input, or `NOT_LEARNED`."""
    documents: Documents | None = None
    """None: tokens attend to all earlier tokens of their sequence."""

    def pinned(self) -> "MicroBatch":
        """A copy in page-locked memory, so that copies to a GPU do not block the host."""
        return self._each(lambda tensor: tensor.pin_memory())

    def on(self, device: torch.device) -> "MicroBatch":
        return self._each(lambda tensor: tensor.to(device, non_blocking=True))

    def _each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "MicroBatch":
        documents = self.documents
        if documents is not None:
            documents = Documents(documents.starts_BS, change(documents.positions_BT))
        return MicroBatch(change(self.inputs_BT), change(self.labels_BT), documents)


@dataclass(frozen=True, slots=True)
class StepBatches:
    """A step's micro batches in host memory, and the checksums of their samples."""

    micro_batches: list[MicroBatch]
    read: Sums


@dataclass(frozen=True, slots=True, kw_only=True)
class Batches:
    train: Sequences
    validation: Sequences | None
    fingerprint: str
    """Fingerprint of the training data."""
    seed: int
    global_batch_size: int
    micro_batch_size: int
    data_parallel: int
    data_rank: int
    counts_in_ledger: bool
    """This rank reports the samples of its data rank to the ledger."""
    skipped: tuple[Window, ...] = ()
    """Batches of the stream that are skipped on purpose."""
    masks_documents: bool = False
    """Micro batches have `documents`."""
    positions_T: torch.Tensor
    """Positions in each sequence of the tokens that this rank reads."""
    device: torch.device

    def of_step(self, step: int) -> list[MicroBatch]:
        """The micro batches of `step`, counted from 1, on the device."""
        return [micro.on(self.device) for micro in self.read_step(step).micro_batches]

    def read_step(self, step: int) -> StepBatches:
        """The micro batches of `step` in host memory. Uses no device, so any thread may call it."""
        first = (batch_of(step, self.skipped) - 1) * self.global_batch_size
        positions = np.concatenate(
            [first + np.arange(at, at + self.micro_batch_size) for at in self._begins()]
        ).astype(np.uint64)
        samples = samples_at(positions, self.train.num, self.seed)
        rows = [self._row(self.train, sample) for sample in samples.tolist()]
        size = self.micro_batch_size
        micro_batches = [self._pack(rows[at : at + size]) for at in range(0, len(rows), size)]
        return StepBatches(
            micro_batches, sums_of(positions, samples) if self.counts_in_ledger else NOTHING
        )

    def evaluation(self, sequences: int | None) -> Iterator[list[MicroBatch]]:
        """The first `sequences` held-out sequences (None: all), in groups as large as a step.

        Every rank gets the same number of groups. The last group is padded with tokens that are not
        learned, so the mean over the learned tokens of all ranks is the same on every mesh.
        """
        if self.validation is None:
            return
        num = min(self.validation.num, sequences or self.validation.num)
        for first in range(0, num, self.global_batch_size):
            yield [
                self._held_out(self.validation, range(first + at, first + at + size), num)
                for at, size in ((at, self.micro_batch_size) for at in self._begins())
            ]

    def _begins(self) -> range:
        """Offsets in the global batch of this rank's micro batches."""
        size = self.micro_batch_size
        return range(self.data_rank * size, self.global_batch_size, self.data_parallel * size)

    def _row(self, sequences: Sequences, place: int) -> Row:
        inputs, labels = sequences.read(place)
        return inputs, labels, sequences.document_starts(place) if self.masks_documents else None

    def _held_out(self, held_out: Sequences, places: range, num: int) -> MicroBatch:
        nothing = np.zeros(held_out.length, dtype=np.int64)
        one_document = nothing if self.masks_documents else None
        padding = nothing, np.full_like(nothing, NOT_LEARNED), one_document
        rows = [self._row(held_out, place) if place < num else padding for place in places]
        return self._pack(rows).on(self.device)

    def _pack(self, rows: Sequence[Row]) -> MicroBatch:
        mine_T = self.positions_T.numpy()
        inputs, labels, documents = zip(*rows, strict=True)
        inputs_BT, labels_BT = (
            torch.from_numpy(np.stack(column)[:, mine_T]) for column in (inputs, labels)
        )
        starts = [row for row in documents if row is not None]
        if not starts:
            return MicroBatch(inputs_BT, labels_BT)
        starts_BS = torch.from_numpy(np.stack(starts))
        return MicroBatch(inputs_BT, labels_BT, documents_at(starts_BS, self.positions_T))
