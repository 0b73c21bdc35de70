"""What one rank reads in a step."""

from dataclasses import dataclass

import numpy as np
import torch

from trainer.data.corpus import Corpus
from trainer.data.order import sample_at


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Whole numbers on the rank's device, [batch, tokens] each; the tokens are this rank's part of
    the sequences where context parallel cuts them."""

    inputs_BT: torch.Tensor
    labels_BT: torch.Tensor
    """The token after each input, or `NOT_LEARNED`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batches:
    corpus: Corpus
    seed: int
    global_batch_size: int
    micro_batch_size: int
    data_parallel: int
    data_rank: int
    positions_T: torch.Tensor
    """Which tokens of each sequence this rank reads."""
    device: torch.device

    def of_step(self, step: int) -> list[MicroBatch]:
        """The micro batches of `step`, counted from 1."""
        per_pass = self.data_parallel * self.micro_batch_size
        return [
            self._micro_batch(step, micro) for micro in range(self.global_batch_size // per_pass)
        ]

    def _micro_batch(self, step: int, micro: int) -> MicroBatch:
        first = (micro * self.data_parallel + self.data_rank) * self.micro_batch_size
        begin = (step - 1) * self.global_batch_size + first
        rows = [
            self.corpus.tokens(sample_at(position, self.corpus.num_samples, self.seed))
            for position in range(begin, begin + self.micro_batch_size)
        ]
        tokens_BT = torch.from_numpy(np.stack(rows).astype(np.int64))
        return MicroBatch(
            tokens_BT[:, self.positions_T].to(self.device),
            tokens_BT[:, self.positions_T + 1].to(self.device),
        )
