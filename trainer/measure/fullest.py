"""Finds the rank that uses the most memory: plans predict its peak, and only rank 0 writes metrics.

The ranks compare their peaks after steps 2, 4, 8, … of an attempt and after the last one, because a
peak rarely grows later, and a comparison makes the ranks wait for each other.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from trainer.rank.ranks import peak_memory_bytes

RANK_BITS = 20
"""Bits for the number of a rank, below those of its bytes, so that one maximum finds both."""


@dataclass(slots=True)
class Fullest:
    """The rank with the highest peak, as far as the ranks have compared."""

    device: torch.device
    done: int
    """Steps that earlier attempts have done."""
    last: int
    """The last step of the job."""
    memory_bytes: int | None = None
    rank: int | None = None

    def is_due(self, step: int) -> bool:
        """Whether the ranks compare after `step`. All ranks get the same answer."""
        return step == self.last or is_power(step - self.done)

    def compare(self) -> None:
        """A collective."""
        own = peak_memory_bytes(self.device) << RANK_BITS | dist.get_rank()
        # On the host, over gloo: the device may have further steps queued, which must not be
        # waited for.
        most = torch.tensor(own, dtype=torch.int64)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        found = int(most.item())
        self.memory_bytes, self.rank = found >> RANK_BITS, found & ((1 << RANK_BITS) - 1)


def is_power(count: int) -> bool:
    """Whether `count` is 2, 4, 8, …"""
    return count >= 2 and count & (count - 1) == 0
